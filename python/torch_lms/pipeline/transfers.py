"""Sends and receives between the ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_lms.ranks.members import Members

__all__ = ["Channel", "Started", "make_channels", "sendable", "wait_all"]

Started = tuple[Sequence[torch.Tensor], Sequence[Any]]  # what is on its way, and what to wait for

_FIRST_TAG = 0x6C6D00


class Channel:
    """Traffic that keeps its own order: others' messages between the same ranks do not count.

    Note [Order]: under Gloo a tag tells channels apart. NCCL knows no tags: there all channels are one queue, and both
    ranks of a transfer have to come to it in the same order.

    Args:
        members: the ranks, by their places.
        number: of the channel.
    """

    def __init__(self, members: Members, number: int) -> None:
        self._ranks, self._group = members.ranks, members.group
        self._tag = _FIRST_TAG + number

    def send_all(self, tensors: Sequence[torch.Tensor], place: int) -> Started:
        """Starts to send tensors that are `sendable`."""
        return self._start(dist.isend, tensors, place)

    def receive_all(self, buffers: Sequence[torch.Tensor], place: int) -> Started:
        """Starts to receive into contiguous tensors."""
        return self._start(dist.irecv, buffers, place)

    def _start(self, operation: Any, tensors: Sequence[torch.Tensor], place: int) -> Started:
        return tensors, self._batch([(operation, tensor, self._ranks[place]) for tensor in tensors])

    def _batch(self, operations: Sequence[tuple[Any, torch.Tensor, int]]) -> Any:
        """Alone, an operation would have a group of two ranks of its own over NCCL."""
        return dist.batch_isend_irecv([dist.P2POp(*each, self._group, self._tag) for each in operations])

    def exchange(
        self, leaving: Sequence[torch.Tensor], target: int, coming: Sequence[torch.Tensor], source: int
    ) -> None:
        """Sends and receives at once, and waits for it."""
        operations: list[tuple[Any, torch.Tensor, int]] = [
            (dist.isend, tensor, self._ranks[target]) for tensor in leaving
        ]
        operations += [(dist.irecv, buffer, self._ranks[source]) for buffer in coming]
        if operations:
            for work in self._batch(operations):
                work.wait()


def sendable(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, contiguous and as their bytes say: neither a conjugated view nor a negated one.

    What is sent is bytes, and ``contiguous`` gives such a view back as it is.
    """
    return tensor.resolve_conj().resolve_neg().contiguous()


def wait_all(started: Started) -> Sequence[torch.Tensor]:
    """Waits for a transfer, and gives the tensors. On CUDA the current stream waits, not the program."""
    tensors, works = started
    for work in works:
        work.wait()
    return tensors


def make_channels(members: Members) -> tuple[Channel, Channel, Channel]:
    """The channels for activations, for gradients, and for everything outside a schedule."""
    return Channel(members, 0), Channel(members, 1), Channel(members, 2)
