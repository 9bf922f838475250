"""The shortest step over some cuts of an order: good cuts first, then a proof, as far as a limit on work allows.

Note [Bounded search]: a step's time is that of its longest path (Note [Longest path] in ``steps``). First come cuts
whose largest load and whose sum are small (the closed form ``sum + (m - 1) * largest`` of pipelines), with equal loads
and with the loads that the schedule would like best if a model could be cut anywhere; all are timed by the schedule
itself and improved by moving neighbouring borders together. Then the proof: for any average of paths dynamic
programming finds the least possible cost, below which no step is. The first average is of the longest paths at the
loads that the schedule likes best, such that work costs the same in every stage; the next ones take in the longest path
of the cuts found last. At last partitions are grown from the front, a stage at a time. One whose stages so far and the
least cost of the rest are no better than the best step known, by any of the averages, is left out; what is whole is
timed. If there are too many, those of the lowest bound go on, and the lowest bound of the others limits what is
claimed: a gap of 0 means that no cuts looked at are better. Where there are few partitions, all of them are timed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import NDArray

from torch_lms.partition.cut_table import CutTable, Lowest, Marks
from torch_lms.partition.steps import BACKWARDS, COMPUTED, ROWS, WEIGHTS
from torch_lms.schedules.rules import splits_backward

__all__ = ["Best", "CutSearch"]

Array = NDArray[np.float64]
_ROUNDING = 1e-9
_SLACK = (0.001, 0.01, 0.05, 0.2, np.inf)
_FIRST_WORK = 3e7  # numbers that all passes for first cuts may look at
_BOUND_WORK = 6e7  # the same, for bounds
_MOST_BOUNDS = 40
_MOST_ROUNDS = 40
_GROWN = 4e6  # numbers in the arrays of partitions that grow
_FITTED = 150
_TIGHT = 0.003  # share of a step that a path may be short of the longest
_CAUTION = 8
_EVEN_TURNS = 1000
_ENUMERATED = 20_000  # partitions whose memory may be looked at one by one
_ALL_TIMED = 1000  # partitions that are timed one by one instead of a search


@dataclass
class Best:
    """The best cuts known so far.

    Attributes:
        marks: indices of the cuts, from 0 to the end.
        step_us: by the schedule.
        share: of the fullest device's memory; above 1 does not fit.
        largest_us: of the stages' times; of steps that are equally long the most even one is best.
        bound_us: no step over these cuts is shorter.
    """

    marks: NDArray[np.int64]
    step_us: float
    share: float
    largest_us: float
    bound_us: float = 0.0

    def beats(self, other: Best) -> bool:
        """Whether it fits better, or is shorter, or more even."""
        mine, others = max(self.share, 1 + _ROUNDING), max(other.share, 1 + _ROUNDING)
        if mine != others or abs(self.step_us - other.step_us) > _ROUNDING * other.step_us:
            return (mine, self.step_us) < (others, other.step_us)
        return self.largest_us < other.largest_us * (1 - _ROUNDING)

    @property
    def fits(self) -> bool:
        """Whether it does."""
        return self.share <= 1 + _ROUNDING


class CutSearch:
    """Looks through the cuts of one table."""

    def __init__(self, table: CutTable) -> None:
        self.table = table
        self.cells = table.stages * len(table.cuts) ** 2
        self.best: Best | None = None
        self._average = np.zeros((ROWS, table.stages))

    def find(self) -> Best | None:
        """Good cuts, without proof; None where not even single stages fit."""
        self._try_balanced(np.ones(self.table.stages))
        if self.best is not None:
            self._try_balanced(self._wanted_loads(self.best))
            if not self.best.fits:
                self._time(self.least_memory()[1][None, :])
            self._improve()
        return self.best

    def prove(self) -> Best | None:
        """The best cuts, with a bound; None if none fit, as far as was looked."""
        every = _every(len(self.table.cuts), self.table.stages, _ALL_TIMED)
        if every is not None:
            self._time(every)
            assert self.best is not None  # there is at least one way to cut
            self.best.bound_us = self.best.step_us
            return self.best if self.best.fits else None
        best = self.find()
        if best is None:
            return None
        averages = self._bounds()
        left_out = self._grow(averages)
        assert self.best is not None  # it never becomes worse
        if not self.best.fits:
            return None
        lowest = max(lowest.cost_us for _, lowest in averages)
        self.best.bound_us = max(lowest, min(left_out, self.best.step_us))
        return self.best

    def least_memory(self) -> tuple[float, Marks, bool]:
        """The smallest share of the fullest device, cuts that reach it, and whether none are below it."""
        table = self.table
        shared = max(map(len, table.step.stages_of)) > 1
        devices = {stage: own for own in table.step.stages_of for stage in own}
        matrices = [table.shares[stage] * len(devices[stage]) for stage in range(table.stages)]
        least = table.lowest_largest(matrices)
        marks = table.choose([np.where(matrix <= least, 0.0, np.inf) for matrix in matrices]).marks
        if not shared:
            return least, marks, True
        every = _every(len(table.cuts), table.stages, _ENUMERATED)
        found = marks[None, :] if every is None else every
        share = table.rows(found)[1]
        return float(share.min()), found[int(share.argmin())], every is not None

    def _time(self, marks: Marks) -> None:
        """Times partitions and keeps the best."""
        if not len(marks):
            return
        rows, share = self.table.rows(marks)
        times = self.table.step.times_us(rows)
        largest = rows[:COMPUTED].sum(axis=0).max(axis=0)
        least_share = np.maximum(share, 1 + _ROUNDING).min()
        fullest = np.maximum(share, 1 + _ROUNDING) > least_share
        shortest = times[~fullest].min()
        first = int(np.where(fullest | (times > shortest * (1 + _ROUNDING)), np.inf, largest).argmin())
        found = Best(marks[first], float(times[first]), float(share[first]), float(largest[first]))
        if self.best is None or found.beats(self.best):
            self.best = found

    def _try_balanced(self, wanted: Array) -> None:
        """Cuts whose largest load, each in terms of the wanted one, is small, and whose sum is smallest under that."""
        table = self.table
        loads = [load / want for load, want in zip(table.loads(), wanted, strict=True)]
        least = table.lowest_largest(loads)
        if not np.isfinite(least):
            return
        ones = np.ones((ROWS, table.stages))
        sums = [table.costs(stage, ones) for stage in range(table.stages)]
        passes = int(np.clip(_FIRST_WORK / self.cells, 3, len(_SLACK)))
        found = []
        for slack in _SLACK[:passes]:
            bound = least * (1 + slack + _ROUNDING)
            found.append(
                table.choose([np.where(load <= bound, one, np.inf) for load, one in zip(loads, sums, strict=True)])
            )
        self._time(np.array([one.marks for one in found if np.isfinite(one.cost_us)], dtype=np.int64))

    def _wanted_loads(self, best: Best) -> Array:
        """The loads that make the shortest step if the model could be cut anywhere, with these transfers.

        Steps against the longest path, in the logarithm of each stage's share of the work.
        """
        rows = self.table.rows(best.marks[None, :])[0][:, :, 0]
        speeds = np.array([device.speed for device in self.table.devices])
        total = (rows[:COMPUTED] * speeds).sum(axis=1)[:, None].repeat(self.table.stages, axis=1)
        if splits_backward(self.table.model.schedule):  # the first stage's whole backward is that of weights
            total[WEIGHTS, 0], total[BACKWARDS, 0] = total[BACKWARDS:, 0].sum(), 0.0
        share = speeds / speeds.sum()
        kept, shortest = rows, np.inf
        paths: dict[bytes, Array] = {}
        for turn in range(_FITTED):
            rows = rows.copy()
            rows[:COMPUTED] = total * share / speeds
            step_us, passes = self.table.step.path(rows)
            paths.setdefault(passes.tobytes(), passes)
            if step_us < shortest:
                kept, shortest = rows, step_us
            slope = (passes[:COMPUTED] * total).sum(axis=0) / speeds
            slope = slope / max(float(slope.max()), 1e-300)
            share = share * np.exp(-0.3 / (1 + turn) ** 0.7 * (slope - float((slope * share).sum())))
            share = share / share.sum()
        tight = [one for one in paths.values() if (one * kept).sum() >= (1 - _TIGHT) * shortest]
        self._average = _even([(one[:COMPUTED] * total).sum(axis=0) / speeds for one in tight], tight)
        wanted: Array = kept[:COMPUTED].sum(axis=0)
        return np.maximum(wanted, 1e-300) / max(float(wanted.mean()), 1e-300)

    def _improve(self) -> None:
        """Moves runs of neighbouring borders together, as long as that helps."""
        end = len(self.table.cuts) - 1
        for _ in range(_MOST_ROUNDS):
            assert self.best is not None  # found before
            before = self.best
            inner = self.best.marks[1:-1]
            tried = []
            for first in range(len(inner)):
                for last in range(first, len(inner)):
                    for far in (1, 2, 4, 8):
                        for by in (far, -far):
                            moved = self.best.marks.copy()
                            moved[first + 1 : last + 2] += by
                            tried.append(moved)
            marks = np.array(tried, dtype=np.int64).reshape(-1, len(inner) + 2)
            marks = marks[(np.diff(marks, axis=1) > 0).all(axis=1) & (marks[:, -2] < end) & (marks[:, 1] > 0)]
            self._time(marks)
            if self.best is before:
                return

    def _bounds(self) -> list[tuple[Array, Lowest]]:
        """Averages of longest paths, each with the least cost of the rest from everywhere."""
        assert self.best is not None  # found before
        count = int(np.clip(_BOUND_WORK / self.cells, 3, _MOST_BOUNDS))
        average = self._average
        found: list[tuple[Array, Lowest]] = []
        for turn in range(count):
            lowest = self.table.lowest(average)
            found.append((average, lowest))
            if lowest.cost_us >= self.best.step_us * (1 - _ROUNDING) or not np.isfinite(lowest.cost_us):
                break
            self._time(lowest.marks[None, :])
            average = average + (self._path(lowest.marks) - average) / (turn + _CAUTION)
        return found

    def _path(self, marks: NDArray[np.int64]) -> Array:
        return self.table.step.path(self.table.rows(marks[None, :])[0][:, :, 0])[1]

    def _grow(self, averages: list[tuple[Array, Lowest]]) -> float:
        """Grows partitions from the front; returns the lowest bound of those left out for want of room."""
        assert self.best is not None  # found before
        chosen = sorted(averages, key=lambda one: -one[1].cost_us)[:6] + averages[:6]
        most = max(int(_GROWN / (len(chosen) * len(self.table.cuts))), 16)
        marks = np.zeros((1, 1), dtype=np.int64)
        costs = np.zeros((len(chosen), 1))
        bounds, left_out = np.zeros(1), np.inf
        for stage in range(self.table.stages):
            each = [
                cost[:, None] + self.table.costs(stage, one, marks[:, -1])
                for cost, (one, _) in zip(costs, chosen, strict=True)
            ]
            bound = np.max([one + low.after_us[stage + 1] for one, (_, low) in zip(each, chosen, strict=True)], axis=0)
            limit = self.best.step_us * (1 - _ROUNDING) if self.best.fits else np.inf
            parent, cut = np.nonzero(bound < limit)
            order = np.argsort(bound[parent, cut], kind="stable")
            if len(order) > most:
                left_out = min(left_out, float(bound[parent[order[most]], cut[order[most]]]))
                order = order[:most]
            parent, cut = parent[order], cut[order]
            marks = np.concatenate([marks[parent], cut[:, None]], axis=1)
            costs = np.array([one[parent, cut] for one in each])
            bounds = bound[parent, cut]
        for start in range(0, len(marks), 2048):
            if self.best.fits and bounds[start] >= self.best.step_us * (1 - _ROUNDING):
                break
            self._time(marks[start : start + 2048])
        return left_out


def _even(slopes: list[Array], paths: list[Array]) -> Array:
    """The average of paths on which work costs as nearly as possible the same in every stage.

    Pairwise Frank-Wolfe steps on the variance over the stages.
    """
    table = np.array(slopes)
    table = table - table.mean(axis=1, keepdims=True)
    products = table @ table.T
    shares = np.zeros(len(paths))
    shares[int(np.diag(products).argmin())] = 1.0
    slope = products @ shares
    for _ in range(_EVEN_TURNS):
        to, source = int(slope.argmin()), int(np.where(shares > 0, slope, -np.inf).argmax())
        curve = products[to, to] - 2 * products[to, source] + products[source, source]
        if curve <= 0 or slope[source] <= slope[to]:
            break
        moved = min(float(shares[source]), float(slope[source] - slope[to]) / curve)
        shares[to] += moved
        shares[source] -= moved
        slope = slope + moved * (products[:, to] - products[:, source])
    average: Array = np.tensordot(np.maximum(shares, 0) / np.maximum(shares, 0).sum(), np.array(paths), axes=1)
    return average


def _every(cuts: int, stages: int, most: int) -> Marks | None:
    """All ways to cut, where there are not too many."""
    if comb(cuts - 2, stages - 1) > most:
        return None
    count = comb(cuts - 2, stages - 1)
    inner = np.array(list(combinations(range(1, cuts - 1), stages - 1)), dtype=np.int64).reshape(count, stages - 1)
    zeros = np.zeros((len(inner), 1), dtype=np.int64)
    return np.concatenate([zeros, inner, zeros + cuts - 1], axis=1)
