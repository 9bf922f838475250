"""Swapping and recomputing inside a stage: what gives the most memory for the least time.

Source: DawnPiper (arXiv:2505.05856), the section on swap and recomputation: swaps that hide behind compute come first,
then whatever saves the most memory for each second that is lost. There a choice is made for each tensor; here for each
segment (Note [Segments]), as a whole segment is computed again at once. Which swaps hide behind compute is not known
before the step is run, so each number of them is a way of its own, those first that are dearest to compute again.

Note [The estimate]: a segment that is computed again takes its forward time once more, up to the last node that saves
something: `torch.utils.checkpoint` stops as soon as backward has all, since PyTorch 2.1. What is swapped goes out while
the stage computes forward and comes back while it computes backward; as much as the link moves in the shorter one of
these is free, and more is not swapped, as nothing waits for copies out and they would take room. What is given up is
there again while its own backward runs: the most of any segment that is computed again counts once, that of swapped
ones three times, since one comes back ahead while another runs and a third is still leaving. A stage may so fit
without swaps alone, or be faster: where both ways are open, both are tried.

Note [Swaps last]: inside pipelines swaps cost more than is predicted. A GPT in two stages on two H200s, with 70 % of
the memory that a plain cut needs, took 843 ms for a step where 720 were predicted, with 13 segments swapped and 28
computed again; with 34 computed again and none swapped it took 730, and 733 were predicted. So what chooses by itself
has ``swap_last``. Where a stage must swap then, the estimate counts at least the time of computing all again that can
be: else a stage might seem to be faster with less room, and searches would take what it costs with more for a bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torch_lms.partition.link_spec import LinkSpec
from torch_lms.partition.moments import Moment
from torch_lms.partition.offers import Segment
from torch_lms.partition.relief import Choice, GivenUp, Relieved, StageNeed

__all__ = ["RecomputeAndSwap"]

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class RecomputeAndSwap:
    """Gives up segments of stages that do not fit, until they do.

    Attributes:
        host_link: the way from a device to the host and back; None for no swaps.
        recompute: whether segments may be computed again.
        swap_last: whether segments are swapped only where to compute them again is not enough. With 70 % of its memory
            a GPT in two stages took 1.29 of its step where swaps came first, and 1.12 without them; Note [Swaps last].
    """

    host_link: LinkSpec | None = None
    recompute: bool = True
    swap_last: bool = False

    def ways(self, needs: Mapping[int, StageNeed]) -> Sequence[Sequence[Choice]]:
        """One for each number of swaps; then what is computed again, that with the most memory for its time first."""
        rates: dict[tuple[int, int], float] = {}  # time to be computed again for each byte
        for stage, need in needs.items():
            for number, one in enumerate(need.offers.segments):
                less = (need.in_flight - need.half_done) * (one.saved_bytes - one.entering_bytes)
                rates[stage, number] = self._again_us(one, need) / less if less > 0 else np.inf
        cheap = sorted(rates, key=rates.__getitem__)
        dear = sorted(rates, key=lambda one: -rates[one])
        swaps = [GivenUp(*one, swapped=True) for one in dear] if self.host_link is not None else []
        if not self.recompute:
            return [[tuple(swaps[: end + 1]) for end in range(len(swaps))]] if swaps else []
        found = []
        for count in range(len(swaps) + 1):
            swapped = set(dear[:count])
            again = [GivenUp(*one, swapped=False) for one in cheap if rates[one] < np.inf and one not in swapped]
            order = (*swaps[:count], *again)
            found.append([order[:end] for end in range(max(count, 1), len(order) + 1)])
        return [way for way in found if way]

    def relieve(self, need: StageNeed, usable_bytes: Any) -> Relieved:
        """See Note [The estimate]; a stage that nothing makes smaller stays as it is."""
        if not self.recompute:
            return self._estimate(need, usable_bytes).made()
        again = self._computing_again(need, usable_bytes)
        if self.host_link is None:
            return again.made()
        swapping = self._estimate(need, usable_bytes)
        if self.swap_last:
            swapping.take_at_least_as_long_as(again)
            again.take_better(swapping)
            return again.made()
        swapping.take_better(again)
        return swapping.made()

    def _computing_again(self, need: StageNeed, usable_bytes: Any) -> _Estimate:
        """Without swaps, each stage with the runs of segments that are best for it; see Note [Runs] in ``offers``."""
        alone = replace(self, host_link=None)
        estimate = alone._estimate(need, usable_bytes)
        for offers in need.coarser:
            estimate.take_better(alone._estimate(replace(need, offers=offers), usable_bytes))
        return estimate

    def _estimate(self, need: StageNeed, usable_bytes: Any) -> _Estimate:
        estimate = _Estimate(need, usable_bytes)
        segments = need.offers.segments
        again_us = [self._again_us(one, need) for one in segments]
        less = [max(one.saved_bytes - one.entering_bytes, 1e-9) for one in segments]  # as in `ways`
        cheap = sorted(range(len(segments)), key=lambda number: again_us[number] / less[number])
        if self.host_link is not None:
            for number in reversed(cheap):
                estimate.swap_if_free(number, self.host_link.transfer_us(segments[number].saved_bytes))
        for number in cheap:
            if again_us[number] < np.inf:
                estimate.compute_again(number, again_us[number])
        return estimate

    def _again_us(self, segment: Segment, need: StageNeed) -> float:
        """What computing a segment again costs for each microbatch; infinite where it gives nothing, or must not be."""
        if not (self.recompute and segment.recomputable and segment.saved_bytes > segment.entering_bytes):
            return np.inf
        return need.replays * segment.again_us / need.speed


class _Estimate:
    """The stages without room, in one row, and what they have given up so far."""

    def __init__(self, need: StageNeed, usable_bytes: Any) -> None:
        self._need = need
        memory = np.asarray(need.memory_bytes, dtype=np.float64)
        least = need.static_bytes + need.transient_bytes
        self._where = np.asarray((memory > usable_bytes) & (least <= usable_bytes))
        self._before = self._some(memory)
        self._usable = self._some(usable_bytes)
        self._first, self._end = self._some(need.first), self._some(need.end)
        self._free_us = self._some(np.minimum(need.forward_us, need.time_us - need.forward_us))
        count = len(self._before)
        self._kept = need.offers.of(self._first, self._end)
        self._given_bytes = np.zeros(count)  # of each microbatch whose backward has not begun
        self._kept_at = [self._at_moment(one) for one in need.worst_moments]
        self._swapped_bytes = np.zeros(count)  # of the largest segment
        self._again_bytes = np.zeros(count)
        self._added_us = np.zeros(count)
        self._crowded = self._memory() > self._usable  # no more once a stage fits: it gives nothing up then

    def _some(self, values: Any) -> Array:
        some: Array = np.broadcast_to(values, self._where.shape)[self._where].astype(np.float64)
        return some

    def _at_moment(self, moment: Moment) -> tuple[int, Array]:
        """Microbatches without what they gave up, and the memory at that moment if nothing is given up.

        What a backward of inputs frees may be of what is given up, so it counts as if it stayed.
        """
        need, held = self._need, moment.held[0]
        flying = held.all * need.held_bytes + held.keeping * need.kept_bytes
        return held.all - held.keeping, self._some(need.static_bytes + need.working_bytes(moment) + flying)

    def _memory(self, at: Ints | slice = slice(None)) -> Array:
        again = self._need.replays * self._again_bytes[at]
        left = [kept[at] - without * self._given_bytes[at] for without, kept in self._kept_at]
        total: Array = np.maximum.reduce(left) + again + 3 * self._swapped_bytes[at]
        return total

    def _open(self, number: int) -> Ints:
        at: Ints = np.flatnonzero(self._kept[number] & self._crowded)
        return at

    def swap_if_free(self, number: int, copy_us: float) -> None:
        """Swaps a segment in the stages that still miss room and whose link is idle for long enough."""
        at = self._open(number)
        at = at[self._free_us[at] >= copy_us]
        self._free_us[at] -= copy_us
        self._give_up(number, at, self._swapped_bytes, 0.0)

    def compute_again(self, number: int, cost_us: float) -> None:
        """Gives a segment up in the stages that still miss room."""
        at = self._open(number)
        self._added_us[at] += cost_us
        self._give_up(number, at, self._again_bytes, self._need.offers.segments[number].entering_bytes)

    def _give_up(self, number: int, at: Ints, back_bytes: Array, entering_bytes: float) -> None:
        if not at.size:
            return
        saved = self._need.offers.segments[number].saved_bytes
        self._kept[number][at] = False
        self._given_bytes[at] += saved - entering_bytes
        back_bytes[at] = np.maximum(back_bytes[at], saved)
        self._crowded[at] = self._memory(at) > self._usable[at]

    def take_at_least_as_long_as(self, other: _Estimate) -> None:
        """Adds time where another one of the same stages takes longer."""
        self._added_us = np.maximum(self._added_us, other._added_us)

    def take_better(self, other: _Estimate) -> None:
        """Takes from another one of the same stages what fits, or is faster; where neither fits, what is smaller."""
        mine, theirs = self._memory(), other._memory()
        fits, other_fits = mine <= self._usable, theirs <= self._usable
        less = np.where(fits, other._added_us < self._added_us, theirs < mine)
        better = (other_fits & ~fits) | ((other_fits == fits) & less)
        for own, others in (
            (self._given_bytes, other._given_bytes),
            (self._swapped_bytes, other._swapped_bytes),
            (self._again_bytes, other._again_bytes),
            (self._added_us, other._added_us),
        ):
            own[better] = others[better]

    def made(self) -> Relieved:
        """Times and memory of all stages."""
        after, need = self._memory(), self._need
        useless = after >= self._before
        time_us = np.broadcast_to(need.time_us, self._where.shape).astype(np.float64)
        memory = np.broadcast_to(need.memory_bytes, self._where.shape).astype(np.float64)
        time_us[self._where] += np.where(useless, 0.0, self._added_us)
        memory[self._where] = np.where(useless, self._before, after)
        return Relieved(time_us=time_us, memory_bytes=memory)
