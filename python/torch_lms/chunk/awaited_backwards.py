"""Which chunks get more gradients: see Note [Parameters spread over ranks]."""

from __future__ import annotations

from collections import Counter

import torch

__all__ = ["AwaitedBackwards"]

_Chunks = tuple[int, ...]
_Unit = tuple[int, ...]


class AwaitedBackwards:
    """Counts, by chunk, the calls of units whose backwards are still to come.

    A call without a graph of its own, inside of a checkpoint, has no hook that tells when its backward ends; the
    checkpoint runs it again in backward, and that run has one. A graph that is kept may tell everything once more.

    Not thread-safe: the lock of its owner guards it.
    """

    def __init__(self) -> None:
        self._is_counted = False  # the call that runs: it has a graph
        self._awaited: Counter[int] = Counter()  # by chunk: calls of units whose backwards are to come
        self._unhooked: Counter[_Unit] = Counter()  # by unit: calls of which only a checkpoint will tell
        self._ended: Counter[int] = Counter()  # by chunk: calls whose backwards have, since the last one began
        self._keeps_graph = False  # the backward that runs: it may come once more
        self._kept: Counter[int] = Counter()  # by chunk: calls whose backwards may
        self._kept_unhooked: Counter[_Unit] = Counter()  # by unit: those of which a checkpoint has told

    def call_begins(self, has_graph: bool) -> None:
        """A unit runs that no other has called."""
        self._is_counted = has_graph

    def note_call(self, unit: _Unit, chunks: _Chunks, *, in_backward: bool) -> bool:
        """A unit is called: whether `backward_ended` is to be told, if there is a graph now.

        Args:
            unit: what it uses, by number.
            chunks: of these.
            in_backward: whether a checkpoint runs it again.
        """
        has_graph = torch.is_grad_enabled()
        if in_backward:  # only what had no graph in the call has none that will tell
            told = has_graph and self._unhooked[unit] > 0
            self._unhooked[unit] -= told
            self._kept_unhooked[unit] += told and self._keeps_graph
            return told
        if self._is_counted:
            self._awaited.update(chunks)
            self._unhooked[unit] += not has_graph
        return self._is_counted and has_graph

    def begin(self, keeps_graph: bool) -> None:
        """The outermost backward."""
        self._keeps_graph = keeps_graph

    def backward_ended(self, chunks: _Chunks) -> None:
        """That of one call of a unit that uses them."""
        self._ended.update(chunks)
        if self._keeps_graph:
            self._kept.update(chunks)

    def take_complete(self) -> list[int]:
        """Chunks that get no more gradients, since the last call."""
        self._awaited.subtract(self._ended)
        complete = [chunk for chunk in self._ended if self._awaited[chunk] == 0]
        self._ended.clear()
        return complete

    def end(self) -> None:
        """The outermost backward has ended, or failed. What a graph that is kept has told it will tell again."""
        self._ended.clear()
        self._awaited.update(self._kept)
        self._unhooked.update(self._kept_unhooked)
        self._kept.clear()
        self._kept_unhooked.clear()
        self._keeps_graph = False

    def forget(self) -> None:
        """No backward of the calls so far comes any more."""
        self._awaited.clear()
        self._unhooked.clear()
