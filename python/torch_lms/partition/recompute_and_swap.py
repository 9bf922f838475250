"""Swapping and recomputing inside a stage: what gives the most memory for the least time, free swaps first.

Source: DawnPiper (arXiv:2505.05856), the section on swap and recomputation: swaps that hide behind compute come first,
then whatever saves the most memory for each second that is lost. There a choice is made for each tensor; here for each
segment (Note [Segments]), as a whole segment is computed again at once.

Note [What giving up costs]: a segment that is computed again takes its forward time once more, up to the last node that
saves something: `torch.utils.checkpoint` stops as soon as backward has all, since PyTorch 2.1. What is swapped goes out
while the stage computes forward and comes back while it computes backward; as much as the link moves in half of the
shorter one of these is free, since copies slow down what runs beside them and nothing says when the link is idle. More
than that costs the time of both copies. What is given up is there again while its own backward runs: the most of any
segment that is computed again counts once, that of swapped ones twice, since the next one comes back meanwhile. A
stage may so fit without swaps alone, or be faster: where both ways are open, both are tried.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torch_lms.partition.costs import LinkSpec
from torch_lms.partition.offers import Segment
from torch_lms.partition.relief import KEPT, RECOMPUTED, SWAPPED, Relieved, StageNeed

__all__ = ["RecomputeAndSwap"]

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
_FREE_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class RecomputeAndSwap:
    """Gives up segments of stages that do not fit, until they do.

    Attributes:
        host_link: the way from a device to the host and back; None for no swaps.
        recompute: whether segments may be computed again.
    """

    host_link: LinkSpec | None = None
    recompute: bool = True

    def relieve(self, need: StageNeed, usable_bytes: Any) -> Relieved:
        """See the class; a stage that nothing makes smaller stays as it is."""
        choice = self._choose(need, usable_bytes)
        if self.host_link is not None and self.recompute:
            choice.take_better(replace(self, host_link=None)._choose(need, usable_bytes))
        return choice.made()

    def _choose(self, need: StageNeed, usable_bytes: Any) -> _Choice:
        choice = _Choice(need, usable_bytes)
        segments = need.offers.segments
        again_us = [one.again_us / need.speed if self._again(one) else np.inf for one in segments]
        if self.host_link is not None:
            swap_us = [self.host_link.transfer_us(one.saved_bytes) for one in segments]
            for number in _by_bytes(segments, again_us)[::-1]:
                choice.swap_if_free(number, swap_us[number])
        else:
            swap_us = [np.inf] * len(segments)
        cost_us = [min(again, 2 * swap) for again, swap in zip(again_us, swap_us, strict=True)]
        for number in _by_bytes(segments, cost_us):
            if cost_us[number] < np.inf:
                choice.take(number, RECOMPUTED if again_us[number] <= cost_us[number] else SWAPPED, cost_us[number])
        return choice

    def _again(self, segment: Segment) -> bool:
        return self.recompute and segment.recomputable and segment.saved_bytes > segment.entering_bytes


def _by_bytes(segments: tuple[Segment, ...], costs_us: list[float]) -> list[int]:
    """Numbers of segments, those with the least time for each byte first; alike ones from the front on."""
    keys = [cost_us / one.saved_bytes for one, cost_us in zip(segments, costs_us, strict=True)]
    return sorted(range(len(segments)), key=keys.__getitem__)


class _Choice:
    """The stages without room, in one row, and what they have given up so far."""

    def __init__(self, need: StageNeed, usable_bytes: Any) -> None:
        self._need = need
        memory = np.asarray(need.memory_bytes, dtype=np.float64)
        least = need.static_bytes + need.transient_bytes
        self._where = np.asarray((memory > usable_bytes) & (least <= usable_bytes))
        self._before = self._some(memory)
        self._usable = self._some(usable_bytes)
        self._first, self._end = self._some(need.first), self._some(need.end)
        self._free_us = _FREE_SHARE * self._some(np.minimum(need.forward_us, need.time_us - need.forward_us))
        count = len(self._before)
        self._offered = [
            np.flatnonzero((self._first <= first) & (self._end >= end)) if count else np.zeros(0, np.int64)
            for first, end in zip(need.offers.first.tolist(), need.offers.end.tolist(), strict=True)
        ]
        self.kinds = np.zeros((len(need.offers.segments), count), dtype=np.int8)
        self._left_bytes = self._before.copy()  # held, without what comes back for its backward
        self._back_bytes = np.zeros((3, count))  # of the largest segment of each kind
        self._added_us = np.zeros(count)

    def _some(self, values: Any) -> Array:
        some: Array = np.broadcast_to(values, self._where.shape)[self._where].astype(np.float64)
        return some

    def _memory(self, at: Ints) -> Array:
        total: Array = self._left_bytes[at] + self._back_bytes[RECOMPUTED, at] + 2 * self._back_bytes[SWAPPED, at]
        return total

    def _open(self, number: int) -> Ints:
        at = self._offered[number]
        at = at[self.kinds[number, at] == KEPT]
        crowded: Ints = at[self._memory(at) > self._usable[at]]
        return crowded

    def swap_if_free(self, number: int, copy_us: float) -> None:
        """Swaps a segment in the stages that still miss room and whose link is idle for long enough."""
        at = self._open(number)
        at = at[self._free_us[at] >= copy_us]
        self._free_us[at] -= copy_us
        self._give_up(number, SWAPPED, at)

    def take(self, number: int, kind: int, cost_us: float) -> None:
        """Gives a segment up in the stages that still miss room."""
        at = self._open(number)
        self._added_us[at] += cost_us
        self._give_up(number, kind, at)

    def _give_up(self, number: int, kind: int, at: Ints) -> None:
        segment = self._need.offers.segments[number]
        less = segment.saved_bytes - (segment.entering_bytes if kind == RECOMPUTED else 0.0)
        self.kinds[number, at] = kind
        self._left_bytes[at] -= self._need.in_flight * less
        self._back_bytes[kind, at] = np.maximum(self._back_bytes[kind, at], segment.saved_bytes)

    def take_better(self, other: _Choice) -> None:
        """Takes from another choice of the same stages what fits, or is faster; where neither fits, what is smaller."""
        every = np.arange(len(self._before))
        mine, theirs = self._memory(every), other._memory(every)
        fits, other_fits = mine <= self._usable, theirs <= self._usable
        less = np.where(fits, other._added_us < self._added_us, theirs < mine)
        better = (other_fits & ~fits) | ((other_fits == fits) & less)
        for own, others in (
            (self.kinds, other.kinds),
            (self._left_bytes, other._left_bytes),
            (self._back_bytes, other._back_bytes),
            (self._added_us, other._added_us),
        ):
            own[..., better] = others[..., better]

    def made(self) -> Relieved:
        """Times and memory of all stages."""
        every = np.arange(len(self._before))
        after = self._memory(every)
        useless = after >= self._before
        self.kinds[:, useless] = KEPT
        need = self._need
        time_us = np.broadcast_to(need.time_us, self._where.shape).astype(np.float64)
        memory = np.broadcast_to(need.memory_bytes, self._where.shape).astype(np.float64)
        time_us[self._where] += np.where(useless, 0.0, self._added_us)
        memory[self._where] = np.where(useless, self._before, after)
        return Relieved(time_us=time_us, memory_bytes=memory, kinds=self.kinds)
