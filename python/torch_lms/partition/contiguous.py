"""Exact dynamic programming over the contiguous stages of one topological order.

Note [Period and sum]: a step takes ``S + (m - 1) * P``, S the sum of stage and transfer times and P the period (Note
[Step time] in ``costs``). For a bound on P the smallest S is one pass of dynamic programming; the smallest P of all is
another. From the largest P that could pay the bound goes down: a pass gives S and some P, anything better has a sum of
at least S, so its period is below both this P and ``(best - S) / (m - 1)``. When that is below the smallest period,
the best one found is optimal. If the passes allowed run out first, what could still be gained is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torch_lms.partition.costs import CostModel, DeviceSpec, LinkSpec
from torch_lms.partition.intervals import StageMatrices, stage_matrices
from torch_lms.partition.relief import StageNeed
from torch_lms.partition.sequence import UnitSequence

__all__ = ["ContiguousStages", "Found"]

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

_CELLS = 2e7  # numbers in all matrices: 160 MB
_SPREAD_CELLS = 5e6  # the same, where not all cuts fit anyway
_WORK = 1.2e9  # numbers that all passes may look at
_MOST_PASSES = 400
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class Found:
    """Cuts between stages, in positions of the order.

    Attributes:
        cuts: one fewer than stages.
        step_us: that they give.
        period_us: of that step.
        gap_us: how much shorter a step could be; 0 where the cuts are optimal among those looked at.
        every_cut: whether all cuts of the order were looked at.
    """

    cuts: tuple[int, ...]
    step_us: float
    period_us: float
    gap_us: float
    every_cut: bool

    @property
    def optimal(self) -> bool:
        """Whether no contiguous stages of this order give a shorter step."""
        return self.every_cut and self.gap_us <= 1e-6 * self.step_us


class ContiguousStages:
    """All ways to cut one order for devices in one order.

    Args:
        sequence: the order.
        devices: of the stages.
        links: between them.
        model: prices.
        most_cells: bound on memory, as numbers in all matrices.
    """

    def __init__(
        self,
        sequence: UnitSequence,
        devices: Sequence[DeviceSpec],
        links: Sequence[LinkSpec],
        model: CostModel,
        most_cells: float = _CELLS,
    ) -> None:
        self.sequence = sequence
        self.devices = devices
        self.links = links
        self.model = model
        every = int((most_cells / len(devices)) ** 0.5)
        self.looks_at_all = len(sequence) + 1 <= max(every, 4 * len(devices) + 1)
        some = int((min(most_cells, _SPREAD_CELLS) / len(devices)) ** 0.5)
        self.most_cuts = max(some, 4 * len(devices) + 1)

    @property
    def capped(self) -> bool:
        """Whether memory matters at all."""
        return any(device.memory_cap_bytes is not None for device in self.devices)

    def solve(self) -> Found | None:
        """The cuts with the shortest step that fit, or None if none do.

        Where there are too many cuts for one table, first a spread of cheap ones is looked at, then all around those
        chosen.
        """
        cuts = self._spread()
        found = _Table(self, cuts).solve()
        if found is None or len(cuts) == len(self.sequence) + 1:
            return found
        near = _Table(self, self._near(found.cuts)).solve()
        return near if near is not None and near.step_us <= found.step_us else found

    def least_memory(self) -> tuple[float, tuple[int, ...]]:
        """The smallest factor on all caps with which some cuts fit, and those cuts."""
        cuts = self._spread()
        factor, chosen = _Table(self, cuts).least_memory()
        if len(cuts) < len(self.sequence) + 1:
            factor, chosen = min((factor, chosen), _Table(self, self._near(chosen)).least_memory())
        return factor, chosen

    def _spread(self) -> Ints:
        """All cuts, or of each equal share of time the one that the fewest bytes cross."""
        end = len(self.sequence)
        if self.looks_at_all:
            return np.arange(end + 1)
        nbytes = self.sequence.cut_forward_bytes + self.sequence.cut_backward_bytes
        before = self.sequence.time_before_us
        share = np.floor(before / max(before[-1], 1e-300) * (self.most_cuts - 2)).astype(np.int64)
        ordered = np.lexsort((nbytes, share))
        first = np.concatenate([[True], np.diff(share[ordered]) > 0])
        return np.unique(np.concatenate([[0], ordered[first], [end]]))

    def _near(self, cuts: Sequence[int]) -> Ints:
        """The cuts around those."""
        end = len(self.sequence)
        reach = max((self.most_cuts - 2) // (2 * max(len(cuts), 1)) - 1, 1)
        around = [np.arange(max(cut - reach, 0), min(cut + reach, end) + 1) for cut in cuts]
        return np.unique(np.concatenate([[0], *around, [end]]))


class _Table:
    """The dynamic programming over some cuts; index i of every array stands for ``cuts[i]``."""

    def __init__(self, stages: ContiguousStages, cuts: Ints) -> None:
        self.cuts = cuts
        self.count = len(stages.devices)
        self.turns = stages.model.microbatches - 1
        self.every_cut = len(cuts) == len(stages.sequence) + 1
        before = stages.sequence.time_before_us[cuts]
        self.times = np.where(np.tri(len(cuts), dtype=bool), np.inf, before[None, :] - before[:, None])
        forward, backward = (
            array[cuts] for array in (stages.sequence.cut_forward_bytes, stages.sequence.cut_backward_bytes)
        )
        self.send = [_transfers(link, forward) for link in stages.links]
        self.back = [_transfers(link, backward) for link in stages.links]
        matrices = stage_matrices(stages.sequence, cuts, stages.model) if stages.capped else None
        self.work: list[Array] = []
        self.load: list[Array] = []
        self.shares: list[Array] = []
        for index, device in enumerate(stages.devices):
            work = self.times / device.speed
            if matrices is not None and device.memory_cap_bytes is not None:
                work, memory = _relieve(work, matrices, stages.model, index, stages)
                share = memory / stages.model.usable_bytes(device)
                self.shares.append(np.where(np.isfinite(self.times), share, np.inf))
                work = np.where(share <= 1 + _ROUNDING, work, np.inf)
            else:
                self.shares.append(np.where(np.isfinite(self.times), 0.0, np.inf))
            self.work.append(work)
            self.load.append(self._loads(work, index, stages.model.overlap_communication))

    def _loads(self, work: Array, index: int, overlap: bool) -> Array:
        """What each stage adds to the period."""
        load = work
        if index > 0:
            send, back = self.send[index - 1], self.back[index - 1]
            load = np.maximum(load, np.maximum(send, back)[:, None]) if overlap else load + send[:, None]
        if index < self.count - 1 and not overlap:
            load = load + self.back[index][None, :]
        return load

    def solve(self) -> Found | None:
        """See Note [Period and sum]."""
        least = self._min_max(self.load)
        if not np.isfinite(least):
            return None
        floor_us = self._pass(np.inf)[0]
        best = self._candidate(least)
        bound = (best.step_us - floor_us) / self.turns if self.turns else np.inf
        gap = 0.0
        passes = int(_WORK / (self.count * len(self.cuts) ** 2))
        for _ in range(min(max(passes, 4), _MOST_PASSES)):
            if bound <= least * (1 + _ROUNDING):
                break
            tried = self._candidate(max(bound, least))
            total = tried.step_us - self.turns * tried.period_us
            best = min(best, tried, key=lambda one: (one.step_us, one.period_us))
            below = tried.period_us * (1 - 4 * _ROUNDING)
            bound = min(below, (best.step_us - total) / self.turns) if self.turns else below
            gap = max(best.step_us - total - self.turns * least, 0.0)
        else:
            return Found(**{**best.__dict__, "gap_us": gap})
        return best

    def least_memory(self) -> tuple[float, tuple[int, ...]]:
        """The smallest largest share of a device's memory, and cuts that reach it."""
        least = self._min_max(self.shares)
        chosen = self._choose([np.where(share <= least, 0.0, np.inf) for share in self.shares])[1]
        return float(least), tuple(int(self.cuts[index]) for index in chosen)

    def _min_max(self, matrices: Sequence[Array]) -> float:
        """The smallest largest entry over all ways to cut."""
        best = np.where(np.arange(len(self.cuts)) == 0, -np.inf, np.inf)
        for matrix in matrices:
            best = np.maximum(best[:, None], matrix).min(axis=0)
        return float(best[-1])

    def _candidate(self, bound: float) -> Found:
        """The cuts of the smallest sum under a bound on the period."""
        total, chosen = self._pass(bound)
        marks = [0, *chosen, len(self.cuts) - 1]
        period = max(float(self.load[stage][marks[stage], marks[stage + 1]]) for stage in range(self.count))
        return Found(
            cuts=tuple(int(self.cuts[index]) for index in chosen),
            step_us=total + self.turns * period,
            period_us=period,
            gap_us=0.0,
            every_cut=self.every_cut,
        )

    def _pass(self, bound: float) -> tuple[float, list[int]]:
        sums = []
        for index in range(self.count):
            allowed = np.where(self.load[index] <= bound * (1 + _ROUNDING), self.work[index], np.inf)
            if index > 0:
                allowed = allowed + (self.send[index - 1] + self.back[index - 1])[:, None]
            sums.append(allowed)
        return self._choose(sums)

    def _choose(self, sums: Sequence[Array]) -> tuple[float, list[int]]:
        """The smallest sum over all ways to cut, and the chosen cuts' indices."""
        best = np.where(np.arange(len(self.cuts)) == 0, 0.0, np.inf)
        froms = []
        for matrix in sums:
            ways = best[:, None] + matrix
            froms.append(ways.argmin(axis=0))
            best = ways[froms[-1], np.arange(len(self.cuts))]
        chosen = [len(self.cuts) - 1]
        for origin in reversed(froms[1:]):
            chosen.append(int(origin[chosen[-1]]))
        return float(best[-1]), chosen[:0:-1]


def _transfers(link: LinkSpec, nbytes: Array) -> Array:
    return np.where(nbytes > 0, link.latency_us + nbytes / link.bytes_per_us, 0.0)


def _relieve(
    work: Array, matrices: StageMatrices, model: CostModel, index: int, stages: ContiguousStages
) -> tuple[Array, Array]:
    need = StageNeed(
        time_us=work,
        static_bytes=matrices.static_bytes,
        held_bytes=matrices.held_bytes,
        transient_bytes=matrices.transient_bytes,
        in_flight=model.in_flight(index, len(stages.devices)),
    )
    time_us, memory = model.relief.relieve(need, model.usable_bytes(stages.devices[index]))
    return time_us, np.ceil(memory)
