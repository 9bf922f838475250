"""The ranks of a process group or of a dimension of a DeviceMesh."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from torch_lms.errors import PipelineError

__all__ = ["Members", "find_members", "find_own_device"]


@dataclass(frozen=True)
class Members:
    """A process group, seen from one of its ranks.

    Attributes:
        group: of torch.distributed; None for the world, which is not to be kept beyond its end.
        ranks: the numbers that its members have in the world, in the group's order.
        place: of this rank among them.
    """

    group: Any
    ranks: tuple[int, ...]
    place: int

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.ranks)

    @property
    def on_nccl(self) -> bool:
        """Whether tensors have to be on CUDA."""
        return bool(dist.get_backend(self.group) == "nccl")

    def meet(self, device: torch.device) -> None:
        """Waits for all members. NCCL also wants all of them in a group's first operation."""
        dist.all_reduce(torch.zeros(1, device=device), group=self.group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def find_members(given: Any, name: str) -> Members:
    """Reads a process group, a DeviceMesh of one dimension, or None for the world.

    Args:
        given: by the user.
        name: of the argument, for errors.

    Raises:
        PipelineError: if torch.distributed is not initialised, the mesh has more dimensions, or this rank is no member.
    """
    if not dist.is_initialized():
        raise PipelineError(
            "expected torch.distributed to be initialised, found it is not; start with torchrun and call "
            "torch.distributed.init_process_group first"
        )
    group = _group_of(given, name)
    if group is None or dist.get_rank(group) < 0:
        raise PipelineError(
            f"expected {name} to be a group that rank {dist.get_rank()} belongs to, found that it does not; make the "
            "Pipeline on the members alone, each with its own group"
        )
    if group is dist.group.WORLD:
        return Members(None, tuple(range(dist.get_world_size())), dist.get_rank())
    to_world = getattr(dist, "get_global_rank", None) or dist.distributed_c10d._get_global_rank  # the latter in 1.12
    ranks = tuple(to_world(group, place) for place in range(dist.get_world_size(group)))
    return Members(group, ranks, dist.get_rank(group))


def _group_of(given: Any, name: str) -> Any:
    if given is None:
        return dist.group.WORLD
    if not hasattr(given, "get_group"):
        return None if given is dist.GroupMember.NON_GROUP_MEMBER else given
    if given.ndim != 1:
        raise PipelineError(
            f"expected a mesh of one dimension for {name}, found {given.ndim} dimensions; name one of them, as in "
            'mesh["pp"]'
        )
    return given.get_group()


def find_own_device(members: Members, given: Any) -> torch.device:
    """The device that was given for this rank; by default its CUDA device under NCCL, else the CPU.

    Raises:
        PipelineError: if it is no device's name.
    """
    own = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if members.on_nccl else "cpu"
    try:
        return torch.device(own if given is None else given)
    except (RuntimeError, TypeError) as error:
        raise PipelineError(f"expected a device such as 'cuda:0', found {given!r}; name one of this rank") from error
