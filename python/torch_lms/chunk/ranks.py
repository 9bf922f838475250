"""The processes that share a model's data: each keeps one part of every chunk."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from torch_lms._torch_compat import all_gather_single
from torch_lms.errors import ChunkError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ALONE", "Ranks", "ranks_of", "until_destroyed"]


def until_destroyed(group: dist.ProcessGroup) -> Callable[[], dist.ProcessGroup]:
    """A way to a group that is no reason for it to live on; see Note [Groups that outlive their end].

    The hooks of a model's parameters lead to its chunks: both go with the garbage collector only, if at all.

    Raises:
        ChunkError: from what is returned, where the group has been destroyed.
    """
    reference = weakref.ref(group)

    def find() -> dist.ProcessGroup:
        found = reference()
        if found is None:
            raise ChunkError(
                "expected the process group that shares the model's data, found it destroyed; call "
                "destroy_process_group after the last use of the model and its optimizer"
            )
        return found

    return find


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """A process group, and this process's place in it.

    Attributes:
        find_group: finds the process group; None if there is one process alone.
        rank: of this process, in the group.
        size: how many there are.
    """

    find_group: Callable[[], dist.ProcessGroup] | None = None
    rank: int = 0
    size: int = 1

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; None if there is one process alone."""
        return None if self.find_group is None else self.find_group()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """All get the first one's bytes."""
        if self.group is not None:
            packed = tensor.detach().contiguous()
            dist.broadcast(packed.view(-1).view(torch.uint8), group=self.group, group_src=0)  # of any type
            if packed.data_ptr() != tensor.data_ptr():
                tensor.copy_(packed)

    def first_of(self, value: Any) -> Any:
        """The first one's value, which can be pickled."""
        values = [value]
        if self.group is not None:
            dist.broadcast_object_list(values, group=self.group, group_src=0)
        return values[0]

    def all_of(self, value: Any) -> list[Any]:
        """Everybody's value, which can be pickled, in order of ranks."""
        values = [value] * self.size
        if self.group is not None:
            dist.all_gather_object(values, value, group=self.group)
        return values

    @contextmanager
    def together(self) -> Iterator[dict[str, str]]:
        """What raises an error on one of them does on all, each of which must come here.

        Yields:
            To be filled with what has to be alike on all, by what it is.

        Raises:
            Exception: this one's error.
            ChunkError: for an error of another, and for what is not alike.
        """
        alike: dict[str, str] = {}
        error = None
        try:
            yield alike
        except Exception as found:
            error = found
        digest = sha256(repr(alike).encode()).hexdigest()  # a large model has much that has to be alike
        told = self.all_of((None if error is None else f"{type(error).__name__}: {error}", digest))
        if error is not None:
            raise error
        for rank, (text, _) in enumerate(told):
            if text is not None:
                raise ChunkError(f"expected no error on any rank, found on rank {rank} {text}; see to that first")
        if len(set(told)) > 1:
            raise ChunkError(_difference(self.all_of(alike)))

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of everybody's tensors, in place."""
        if self.group is not None:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def joined(self, part: torch.Tensor) -> torch.Tensor:
        """Everybody's parts of a chunk, one behind the other."""
        if self.group is None:
            return part
        whole = torch.empty(self.size * part.numel(), dtype=part.dtype, device=part.device)
        all_gather_single(whole, part, group=self.group)
        return whole


ALONE = Ranks()


def _difference(said: Sequence[Mapping[str, str]]) -> str:
    """An error's text: the first thing that is not alike, and where it is what."""
    names = dict.fromkeys(name for of_rank in said for name in of_rank)
    name = next(name for name in names if len({of_rank.get(name) for of_rank in said}) > 1)
    ranks: dict[str, list[int]] = {}
    for rank, of_rank in enumerate(said):
        ranks.setdefault(of_rank.get(name, "none"), []).append(rank)
    found = ", ".join(
        f"{value} on {'rank' if len(there) == 1 else 'ranks'} {', '.join(map(str, there))}"
        for value, there in ranks.items()
    )
    return f"expected all ranks to call torch_lms.chunked alike, found {name}: {found}; pass the same on all of them"


def ranks_of(mesh: DeviceMesh | None) -> Ranks:
    """Of one dimension of a mesh.

    Raises:
        ChunkError: for what is no mesh, or has several dimensions.
    """
    if mesh is None:
        return ALONE
    if not hasattr(mesh, "get_local_rank"):
        raise ChunkError(f"expected a DeviceMesh, found {mesh!r}; pass one dimension of one: mesh['dp']")
    if mesh.ndim != 1:
        raise ChunkError(
            f"expected a mesh of one dimension, whose ranks are to share the model's data, found {mesh.ndim}; "
            "pass that dimension: mesh['dp']"
        )
    if mesh.size() == 1:
        return ALONE
    return Ranks(find_group=until_destroyed(mesh.get_group()), rank=mesh.get_local_rank(), size=mesh.size())
