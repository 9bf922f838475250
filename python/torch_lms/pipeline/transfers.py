"""Sends and receives between the ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_lms.pipeline.circle import Circle
from torch_lms.pipeline.liveness import Liveness
from torch_lms.pipeline.members import Members, find_members
from torch_lms.pipeline.messages import Messages

__all__ = ["Channel", "make_channels", "wait_all"]

_FIRST_TAG = 0x6C6D00


class Channel:
    """Traffic that keeps its own order: others' messages between the same ranks do not count.

    Note [Order]: under Gloo a tag tells channels apart. NCCL knows no tags: there two channels that are in use at the
    same time have a group each.

    Args:
        members: the ranks, by their places.
        number: of the channel.
        group: of its own, if it has one.
    """

    def __init__(self, members: Members, number: int, group: Any = None) -> None:
        self._ranks, self._group = members.ranks, members.group if group is None else group
        self._tag = _FIRST_TAG + number

    def send(self, tensor: torch.Tensor, place: int) -> tuple[torch.Tensor, Any]:
        """Starts to send a contiguous tensor."""
        return tensor, dist.isend(tensor, self._ranks[place], group=self._group, tag=self._tag)

    def receive(self, buffer: torch.Tensor, place: int) -> tuple[torch.Tensor, Any]:
        """Starts to receive into a contiguous tensor."""
        return buffer, dist.irecv(buffer, self._ranks[place], group=self._group, tag=self._tag)

    def exchange(
        self, leaving: Sequence[torch.Tensor], target: int, coming: Sequence[torch.Tensor], source: int
    ) -> None:
        """Sends and receives at once, and waits for it."""
        operations: list[tuple[Any, torch.Tensor, int]] = [
            (dist.isend, tensor, self._ranks[target]) for tensor in leaving
        ]
        operations += [(dist.irecv, buffer, self._ranks[source]) for buffer in coming]
        if operations:
            for work in dist.batch_isend_irecv([dist.P2POp(*each, self._group, self._tag) for each in operations]):
                work.wait()


def wait_all(works: Sequence[tuple[torch.Tensor, Any]]) -> list[torch.Tensor]:
    """Waits for transfers, and gives the tensors. On CUDA the current stream waits, not the program."""
    for _, work in works:
        work.wait()
    return [tensor for tensor, _ in works]


def make_channels(members: Members, liveness: Liveness, own_groups: bool) -> tuple[Channel, Channel, Channel]:
    """The channels for activations, for gradients, and for everything outside a schedule.

    Args:
        members: the ranks of the pipeline.
        liveness: to leave a wait for a rank that has died.
        own_groups: whether a schedule uses the first two at once over NCCL. All ranks of the world then make their
            pipelines at the same time.
    """
    if not own_groups:
        return Channel(members, 0), Channel(members, 1), Channel(members, 2)
    forward, backward = _make_groups(members, liveness)
    return Channel(members, 0, forward), Channel(members, 1, backward), Channel(members, 2)


def _make_groups(members: Members, liveness: Liveness) -> list[Any]:
    """Two more groups of the same ranks.

    torch.distributed wants all ranks of the world to make all groups in one order: they tell each other what they need.
    """
    everyone = Messages(Circle(find_members(None, "the world"), "groups"), liveness)
    needed = sorted(set(everyone.gather(members.ranks)))
    made = {(ranks, index): dist.new_group(ranks) for ranks in needed for index in range(2)}
    return [made[members.ranks, index] for index in range(2)]
