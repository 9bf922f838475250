"""How small the largest stage cost can be: a bound that holds for every partition of a problem.

Note [Stage cost]: the time of one microbatch in a stage, forward and backward, and of all transfers over the stage's
borders, in and out, both ways. Between two stages everything goes as one transfer each way, so a link's latency counts
once for each direction that carries bytes. A value whose reader is several stages away crosses each border between and
counts at each of them, and a result of the model goes on to the last stage; an input of the model counts nowhere. This
is what the stages of this project's pipelines send (`Figures.cut_forward_us`, `Figures.cut_backward_us`).

Note [Nested cuts]: of a partition, the units up to a border form a set that has all inputs of its units, and the set of
each border has that of the border before. What crosses a border depends on its set alone. The program has one binary
variable for each unit and each border that it looks at. Between two such borders lies a superblock of one or more
stages; with z the largest stage cost, its work with the transfers over its borders, inner ones twice, takes at most as
many z as it has stages. The least z is a bound, whichever borders are looked at.

From the source: the problem; the simple bound, by the mean and by the largest node; the superblocks before, in and
after one stage; and the exact program, which looks at all borders. Ours: the transfers as in [Stage cost] (there a
tensor goes straight to the stages that read it, and is paid once by its maker's stage and once by each of theirs); the
largest of the bounds by each stage's superblocks, since no row says which stage is the largest; the least cost of each
border, which is found first and is what inner borders are charged; and a known partition, below whose cost most units
lie on one known side of each border, so that the programs are small.

Source: Archer, Fahrbach, Liu and Prabhu, Practical Performance Guarantees for Pipelined DNN Inference, ICML 2024
(arXiv 2311.03703), the lower bounds by mixed-integer programs.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torch_lms.errors import PartitionError
from torch_lms.partition.figures import Figures
from torch_lms.partition.interface import PartitionProblem
from torch_lms.partition.link_spec import LinkSpec
from torch_lms.partition.sequence import UnitSequence
from torch_lms.partition.units import MODEL_INPUT
from torch_lms.plan.linear import scipy_is_there
from torch_lms.plan.rows import Rows

__all__ = ["BottleneckBound", "bottleneck_bound", "stage_costs_us"]

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
_TOLERANCE = 1e-6  # of the solver, by which a bound is lowered
_SHARE = 1 / 8  # of the time that is left, for each program but the last


@dataclass(frozen=True, kw_only=True)
class BottleneckBound:
    """Between what the largest stage cost of the best partition lies; see Note [Stage cost].

    Attributes:
        lower_us: no partition has less.
        upper_us: of the best one that cuts a known order of the units, without regard to memory.
    """

    lower_us: float
    upper_us: float


def stage_costs_us(figures: Figures) -> tuple[float, ...]:
    """The cost of each stage; see Note [Stage cost]."""
    pairs = zip(figures.cut_forward_us, figures.cut_backward_us, strict=True)
    borders = np.array([0.0, *(forward + backward for forward, backward in pairs), 0.0])
    return tuple((np.array(figures.stage_time_us) + borders[:-1] + borders[1:]).tolist())


def bottleneck_bound(problem: PartitionProblem, *, seconds: float = 10.0) -> BottleneckBound:
    """A bound of the largest stage cost of all partitions, whether or not they fit the devices' memory.

    Args:
        problem: with a device of its own for each stage, all of one speed, and one link.
        seconds: at most for the programs, roughly; what is proven by then is returned.

    Raises:
        PartitionError: for other devices or links, or without SciPy.
    """
    _check(problem)
    units = _CostedUnits(problem)
    upper_us = units.contiguous_us(problem.orders.values())
    simple_us = min(problem.lower_bound_us, upper_us)
    if upper_us <= 0:
        return BottleneckBound(lower_us=0.0, upper_us=0.0)
    proven = _search(units, upper_us, simple_us / upper_us, seconds) * (1 - _TOLERANCE)
    return BottleneckBound(lower_us=max(simple_us, proven * upper_us), upper_us=upper_us)


def _check(problem: PartitionProblem) -> None:
    if not scipy_is_there():
        raise PartitionError("expected SciPy, which solves the programs, found none; pip install torch-lms[plan]")
    speeds = sorted({device.speed for device in problem.devices})
    if len(speeds) > 1:
        raise PartitionError(
            f"expected devices of one speed, found speeds {', '.join(map(str, speeds))}; bound the largest stage time "
            "by lower_bound_us instead"
        )
    names = {device.name for device in problem.devices}
    if len(names) < problem.stages:
        raise PartitionError(
            f"expected a device for each of {problem.stages} stages, found {len(names)}; name each device once"
        )
    links = len(_links(problem))
    if links > 1:
        raise PartitionError(
            f"expected one link for all pairs of devices, found {links} different ones; give one LinkSpec"
        )


def _links(problem: PartitionProblem) -> set[LinkSpec]:
    return {problem.links} if isinstance(problem.links, LinkSpec) else set(problem.links.values())


def _search(units: _CostedUnits, upper_us: float, simple: float, seconds: float) -> float:
    """The bound over a known partition's cost: first each border's least cost, then superblocks, then all borders."""
    end = time.monotonic() + seconds
    last = units.stages - 1
    floors, proven = np.zeros(last), simple
    rounds: list[tuple[list[int], int | None, bool]]
    rounds = [([border], border, whole) for whole in (False, False, True) for border in range(last)]
    rounds += [([one for one in (stage - 1, stage) if 0 <= one < last], None, True) for stage in range(last + 1)]
    rounds += [(list(range(last)), None, True)]
    for done, (borders, goal, whole) in enumerate(rounds, 1):
        left = end - time.monotonic()
        if left <= 0 or proven >= 1 - _TOLERANCE:
            break
        program = _NestedCuts(units, upper_us, floors, proven, borders, goal)
        least = program.least(left if done == len(rounds) else left * _SHARE, whole=whole)
        if goal is None:
            proven = max(proven, min(least, 1.0))
        elif math.isfinite(least):
            floors[goal] = max(floors[goal], least * (1 - _TOLERANCE))
    return proven


class _CostedUnits:
    """What the programs need of a problem's units.

    Attributes:
        stages: how many.
        time_us: of each unit on a device.
        link: between stages.
        until_us: of each unit with all that must not be in later stages.
        from_us: of each unit with all that must not be in earlier stages.
        until_count: as ``until_us``, how many.
        from_count: as ``from_us``, how many.
        edges: pairs of units that must come in this order, less those that follow from others.
        values: of each maker and its last readers, the bytes forward and backward. Where the model's output is one of
            them, it alone.
    """

    def __init__(self, problem: PartitionProblem) -> None:
        units = problem.units
        self._units, self.stages = units, problem.stages
        self.time_us: Array = units.time_us / problem.devices[0].speed
        self.link = next(iter(_links(problem)), LinkSpec())
        before = np.eye(len(units), dtype=bool)
        for unit, inputs in enumerate(units.inputs):
            for source in inputs:
                before[unit] |= before[source]
        self.until_us, self.from_us = before @ self.time_us, self.time_us @ before
        self.until_count, self.from_count = before.sum(axis=1), before.sum(axis=0)
        self.edges = [(source, unit) for unit, inputs in enumerate(units.inputs) for source in _last(before, inputs)]
        self.values: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
        for value in units.values:
            ends = len(units) in value.consumers
            key = value.producer, (len(units),) if ends else _last(before, value.consumers)
            if value.producer != MODEL_INPUT:
                forward, backward = self.values.get(key, (0, 0))
                self.values[key] = forward + value.forward_bytes, backward + value.backward_bytes

    def __len__(self) -> int:
        return len(self.time_us)

    def contiguous_us(self, orders: Iterable[Ints]) -> float:
        """The least largest stage cost of all partitions that cut one of these orders."""
        return min(self._cut_us(UnitSequence(self._units, order)) for order in orders)

    def _cut_us(self, sequence: UnitSequence) -> float:
        ends = np.concatenate([[0.0], np.cumsum(self.time_us[sequence.order])])
        sent = zip(sequence.cut_forward_bytes, sequence.cut_backward_bytes, strict=True)
        border = np.array([self.link.transfer_us(one) + self.link.transfer_us(other) for one, other in sent])
        border[0] = border[-1] = 0.0
        least = np.full(len(ends), np.inf)
        least[0] = 0.0
        for _ in range(self.stages):
            stage_us = (ends[at] - ends[:at] + border[at] + border[:at] for at in range(1, len(ends)))
            least = np.array([np.inf, *(np.maximum(least[: len(one)], one).min() for one in stage_us)])
        return float(least[-1])


def _last(before: NDArray[np.bool_], those: Sequence[int]) -> tuple[int, ...]:
    """Of some units those that come before none of the others: what holds for them holds for all."""
    alone = before[np.ix_(those, those)].sum(axis=0) == 1
    return tuple(sorted(unit for unit, one in zip(those, alone, strict=True) if one))


class _NestedCuts:
    """The program of Note [Nested cuts], in shares of a known partition's largest stage cost.

    Args:
        units: to place.
        upper_us: of the known partition.
        floors: the least cost of each border, as far as it is known.
        proven: z is no less.
        borders: that it looks at.
        goal: the border whose cost is minimised; None to minimise z.
    """

    def __init__(
        self,
        units: _CostedUnits,
        upper_us: float,
        floors: Array,
        proven: float,
        borders: Sequence[int],
        goal: int | None,
    ) -> None:
        self._units, self._upper_us, self._floors, self._rows = units, upper_us, floors, Rows()
        self._whole: list[int] = []
        self._outside = self._rows.variable(most=0.0)
        self._inside = self._rows.variable(least=1.0, most=1.0)
        self._largest = self._rows.variable(least=proven, most=1 + _TOLERANCE, cost=float(goal is None))
        nothing = np.full(len(units), self._outside), self._outside
        ends = [(-1, *nothing)]
        for border in borders:
            cut = self._cut(border)
            ends.append((border, cut, self._border_cost(border, cut, minimised=border == goal)))
        ends.append((units.stages - 1, np.full(len(units), self._inside), self._outside))
        for one, other in itertools.pairwise(ends):
            self._superblock(*one, *other)

    def least(self, seconds: float, *, whole: bool) -> float:
        """What is proven of the minimum in that time, with units whole or in parts; see `Rows.least`."""
        return self._rows.least(whole=np.array(self._whole if whole else [], dtype=np.int64), seconds=seconds)

    def _cut(self, border: int) -> Ints:
        """For each unit the variable that is 1 where it comes before a border."""
        units, before, after = self._units, border + 1, self._units.stages - 1 - border
        inner = 2 * self._floors[:border].sum(), 2 * self._floors[border + 1 :].sum()
        room_before = before * (1 + _TOLERANCE) - inner[0] - self._floors[border]
        room_after = after * (1 + _TOLERANCE) - inner[1] - self._floors[border]
        never = (units.until_us > room_before * self._upper_us) | (units.until_count > len(units) - after)
        always = (units.from_us > room_after * self._upper_us) | (units.from_count > len(units) - before)
        cut = np.where(always, self._inside, self._outside)
        for unit in np.flatnonzero(~never & ~always):
            self._whole.append(self._rows.variable(most=1.0))
            cut[unit] = self._whole[-1]
        for source, user in units.edges:
            self._implies(cut[user], cut[source])
        return cut

    def _border_cost(self, border: int, cut: Ints, *, minimised: bool) -> int:
        """The variable of what the transfers over a border take."""
        cost = self._rows.variable(least=self._floors[border], cost=float(minimised))
        row, link = {cost: -1.0}, self._units.link
        latency = link.latency_us / self._upper_us
        directions = [self._rows.variable(most=1.0) for _ in range(2)]
        row |= dict.fromkeys(directions, latency)
        for (producer, consumers), sizes in self._units.values.items():
            crosses = self._crosses(cut, producer, consumers) if any(sizes) else self._outside
            if crosses == self._outside:
                continue
            row[crosses] = row.get(crosses, 0.0) + sum(sizes) / link.bytes_per_us / self._upper_us
            for direction, nbytes in zip(directions, sizes, strict=True):
                if nbytes and latency:
                    self._implies(crosses, direction)
        self._rows.at_most(row, 0.0)
        return cost

    def _crosses(self, cut: Ints, producer: int, consumers: tuple[int, ...]) -> int:
        """A variable that is 1 where a value crosses a border."""
        made = int(cut[producer])
        read = [self._outside if one == len(self._units) else int(cut[one]) for one in consumers]
        read = [one for one in read if one not in (made, self._inside)]
        if not read or made == self._outside:
            return self._outside
        if self._outside in read:
            return made
        crosses = self._rows.variable(most=1.0)
        for one in read:
            self._rows.at_most({made: 1.0, one: -1.0, crosses: -1.0}, 0.0)
        return crosses

    def _superblock(self, start: int, before: Ints, cost_before: int, end: int, until: Ints, cost_until: int) -> None:
        """The rows of the stages between two borders: none of them costs more than z or is empty."""
        stages = end - start
        for one, other in zip(before, until, strict=True):
            self._implies(one, other)
        shares = self._units.time_us / self._upper_us
        width = 1 + max(int(before.max()), int(until.max()), cost_before, cost_until, self._largest)
        work = np.bincount(until, shares, width) - np.bincount(before, shares, width)
        for at, factor in ((cost_before, 1), (cost_until, 1), (self._largest, -stages)):
            work[at] += factor
        inner = 2 * float(self._floors[start + 1 : end].sum())
        count = np.bincount(before, minlength=width) - np.bincount(until, minlength=width)
        for row, most in ((work, -inner), (count, -stages)):
            self._rows.at_most({int(at): float(row[at]) for at in np.flatnonzero(row)}, most)

    def _implies(self, one: int, other: int) -> None:
        """Where one variable is 1 the other is."""
        if one not in (self._outside, other) and other != self._inside:
            self._rows.at_most({int(one): 1.0, int(other): -1.0}, 0.0)
