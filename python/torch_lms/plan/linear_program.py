"""The rows of a linear program over fractions of keep, swap and recompute.

Note [The program]: for every stretch a fraction that is swapped and one that is recomputed. At each checkpoint j, in
MiB and ms, with D_j the time since the one before (ops, replays at the earliest place at which they may happen, and a
wait w_j):

    held:      M_j = M_(j-1) + stretches that begin - stretches that end
    backlog:   B_j >= B_(j-1) + swapped out since - out rate * D_j
    ahead:     F_j <= F_(j-1) + in rate * D_j - swapped storages needed since
    memory:    plain_j - M_j + B_j + F_j + spent inputs that are held <= limit
    total:     all copies of a direction fit into the cycle, and so does what the host does

Minimised are the replays and the waits. Backlog and ahead are fluid, and a replay that must come early gives no more
memory than one that comes late: every plan that the simulator carries out is a point of this program, so its value is a
bound. A spent input of a recipe, one that the program has released by then, is held or replayed too; how long it is
held, `holds` knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from torch_lms.plan.checkpoints import choose_checkpoints
from torch_lms.plan.decision import RECOMPUTE
from torch_lms.plan.holds import Ask, find_asks, find_late_asks
from torch_lms.plan.problem import Choices, Problem
from torch_lms.plan.rows import Rows, Solution
from torch_lms.plan.spent import Dropped, earliest_replays, find_spent, reach

__all__ = ["LinearProgram"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_MIB = float(2**20)
_COPY_PRICE = 0.02
_LINK_RESERVE = 0.05
_IDLE_PRICE = 0.1  # of the host's time


class LinearProgram:
    """Builds the rows of [The program].

    Args:
        problem: what is asked.
        dropped: what is likely to be, see [Rounds] in `linear`. Relief ends where one of them has to be made again,
            copies have a small price and the link is a little slower. None to bound, not to plan.
    """

    def __init__(self, problem: Problem, dropped: Dropped | None = None) -> None:
        self._problem, self._careful = problem, dropped is not None
        self._at = choose_checkpoints(problem.plain_bytes, problem.durations_us, problem.limit_bytes)
        self._count = len(self._at)
        self._durations_us = problem.elapsed_us if self._careful else problem.durations_us
        # Where the host's times are known, the row of its time says what they cost.
        self._host_price = _IDLE_PRICE if problem.trace.host.op_us else 1.0
        # For each place the first checkpoint that is not before it.
        self._next: list[int] = np.searchsorted(self._at, np.arange(len(problem.durations_us) + 2)).tolist()
        needy = problem.plain_bytes > problem.limit_bytes
        useful = problem.arrays.sums(needy.astype(np.float64)) > 0
        self._numbers: list[int] = np.flatnonzero(useful).tolist()
        self._earliest = earliest_replays(problem, dropped)
        reached = {number: reach(problem, number) for number, one in enumerate(problem.candidates) if one.replay}
        self._spent = find_spent(problem, self._earliest, reached)
        self.rows = Rows()
        self._add_variables()
        reached = {number: reached[number] for number in self._numbers if number in reached}
        asks = find_asks(problem, reached, self._spent, self._earliest, dropped)
        if not self._careful:
            asks += find_late_asks(problem, reached, self._spent, self._earliest)
        self._add_memory(needy, asks)
        self._add_link()
        if problem.trace.host.op_us:
            self._add_host_time()
        self._add_spent(asks)
        if problem.host_limit_bytes is not None:
            self._add_host(problem.host_limit_bytes)

    @property
    def fractions(self) -> Ints:
        """The variables that should be whole."""
        chosen = [*self._swap.values(), *self._replay.values(), *self._drop.values()]
        return np.array(chosen, dtype=np.int64)

    def dropped(self, solution: Solution) -> Dropped:
        """What a solution drops."""
        candidates = frozenset(number for number, kind in self.choices(solution).items() if kind == RECOMPUTE)
        spent = frozenset(storage for storage, variable in self._drop.items() if solution.values[variable] >= 0.5)
        return Dropped(candidates, spent)

    def choices(self, solution: Solution) -> Choices:
        """What a solution decides."""
        made: Choices = {}
        for number in self._numbers:
            swapped = solution.values[self._swap[number]] if number in self._swap else 0.0
            replayed = solution.values[self._replay[number]] if number in self._replay else 0.0
            if swapped + replayed >= 0.5:
                kind = self._problem.leave_kind(self._problem.candidates[number])
                made[number] = RECOMPUTE if replayed > swapped else kind
        return made

    def _add_variables(self) -> None:
        rows, candidates = self.rows, self._problem.candidates
        self._swap: dict[int, int] = {}
        self._replay: dict[int, int] = {}
        for number in self._numbers:
            one = candidates[number]
            if one.swappable:
                copy_us = 0.0 if one.back_at is None else self._problem.trace.link.in_us(one.bytes)
                host_us = self._problem.host_us(number, self._problem.leave_kind(one))
                price_us = _COPY_PRICE * copy_us + self._host_price * host_us + self._problem.piece_us(number)
                self._swap[number] = rows.variable(most=1.0, cost=price_us / 1e3 if self._careful else 0.0)
            if one.replay is not None:
                host_us = self._host_price * self._problem.host_us(number, RECOMPUTE) if self._careful else 0.0
                self._replay[number] = rows.variable(most=1.0, cost=(one.replay.own_us + host_us) / 1e3)
            if one.swappable and one.replay is not None:
                rows.at_most({self._swap[number]: 1.0, self._replay[number]: 1.0}, 1.0)
        self._drop = {
            storage: rows.variable(most=1.0, cost=one.duration_us / 1e3)
            for storage, one in self._spent.items()
            if one.droppable
        }
        self._early: dict[int, int] = {}
        self._hold: dict[int, dict[int, int]] = {}
        self._waits = [rows.variable(cost=1.0) for _ in range(self._count + 1)]
        self._held = [rows.variable(least=-np.inf) for _ in range(self._count)]
        self._backlog = [rows.variable() for _ in range(self._count)]
        self._ahead = [rows.variable() for _ in range(self._count)]

    def _add_memory(self, needy: NDArray[np.bool_], asks: list[Ask]) -> None:
        """Rows ``held`` and ``memory``."""
        steps: list[dict[int, float]] = [{} for _ in range(self._count)]

        for number in self._numbers:
            one = self._problem.candidates[number]
            size = one.bytes / _MIB
            swapped, replayed = ([given[number]] if number in given else [] for given in (self._swap, self._replay))
            end = min(one.end + 1, self._earliest[number]) if self._careful else one.end + 1
            self._stretch(steps, [*swapped, *replayed], one.out_after + 1, end, size)
            if one.wrapped_end >= 0:
                self._stretch(steps, swapped, 0, one.wrapped_end + 1, size)
        for number in sorted({ask.late for ask in asks if ask.late is not None} & self._replay.keys()):
            one = self._problem.candidates[number]
            self._early[number] = self.rows.variable(most=1.0)
            self._stretch(steps, [self._early[number]], self._earliest[number], one.end + 1, -one.bytes / _MIB)
            self.rows.at_most({self._early[number]: 1.0, self._replay[number]: -1.0}, 0.0)
        self._add_holds(steps, asks)
        room = (self._problem.limit_bytes - self._problem.plain_bytes[self._at]) / _MIB
        for place in range(self._count):
            before = {self._held[place - 1]: 1.0} if place else {}
            self.rows.equal({self._held[place]: -1.0, **before, **steps[place]}, 0.0)
            if needy[self._at[place]]:
                used = {self._held[place]: -1.0, self._backlog[place]: 1.0, self._ahead[place]: 1.0}
                self.rows.at_most(used, float(room[place]))

    def _add_holds(self, steps: list[dict[int, float]], asks: list[Ask]) -> None:
        """What is held for long is held for short, too."""
        ends: dict[int, set[int]] = {}
        for ask in asks:
            ends.setdefault(ask.given, set()).add(ask.end)
        for storage, places in ends.items():
            held = self._hold[storage] = {end: self.rows.variable(most=1.0) for end in sorted(places)}
            given = self._problem.trace.storages[storage]
            first = (given.released or 0) + 1
            for end, variable in held.items():
                self._stretch(steps, [variable], first, end, -given.bytes / _MIB)
                first = max(first, end)
            for longer, shorter in pairwise(reversed(held.values())):
                self.rows.at_most({longer: 1.0, shorter: -1.0}, 0.0)

    def _stretch(self, steps: list[dict[int, float]], variables: list[int], first: int, end: int, size: float) -> None:
        low, high = self._next[first], self._next[end]
        if low >= high:
            return
        for variable in variables:
            steps[low][variable] = steps[low].get(variable, 0.0) + size
            if high < self._count:
                steps[high][variable] = steps[high].get(variable, 0.0) - size

    def _add_link(self) -> None:
        """Rows ``backlog``, ``ahead`` and ``total``."""
        link, places = self._problem.trace.link, len(self._problem.durations_us)
        plain_ms, replays = self._spans()
        share = (1.0 - _LINK_RESERVE if self._careful else 1.0) * 1e3 / _MIB
        out_rate, in_rate = link.out_bytes_per_us * share, link.in_bytes_per_us * share
        leaving: list[dict[int, float]] = [{} for _ in range(self._count + 1)]
        needed: list[dict[int, float]] = [{} for _ in range(self._count + 1)]
        all_out: dict[int, float] = {}
        all_in: dict[int, float] = {}
        for number, variable in self._swap.items():
            one = self._problem.candidates[number]
            if not one.unchanged:
                leaving[self._next[one.out_after + 1]][variable] = one.bytes / _MIB
                all_out[variable] = link.out_us(one.bytes) / 1e3
            if one.back_at is not None:
                back_at = one.back_at % places
                if self._careful and one.back_at < places:
                    back_at = min(back_at, self._earliest[number])
                needed[self._next[back_at]][variable] = one.bytes / _MIB
                all_in[variable] = link.in_us(one.bytes) / 1e3
        wraps = any((one.back_at or 0) >= places for one in self._problem.candidates)
        carried = self.rows.variable() if wraps else None  # what the cycle before has brought in
        for j in range(self._count):
            span = {self._waits[j]: 1.0, **replays[j]}
            before = {self._backlog[j - 1]: 1.0} if j else {}
            row = {**before, **leaving[j], self._backlog[j]: -1.0}
            self.rows.at_most(_plus(row, span, -out_rate), out_rate * plain_ms[j])
            ahead = {self._ahead[j - 1]: -1.0} if j else {} if carried is None else {carried: -1.0}
            row = {**ahead, **needed[j], self._ahead[j]: 1.0}
            self.rows.at_most(_plus(row, span, -in_rate), in_rate * plain_ms[j])
        if self._careful:
            self._add_late_copies(out_rate, in_rate, replays)
        last = {**needed[-1], self._ahead[-1]: -1.0}
        self.rows.at_most(_plus(last, {self._waits[-1]: 1.0, **replays[-1]}, -in_rate), in_rate * plain_ms[-1])
        whole = dict.fromkeys(self._waits, 1.0)
        for more in replays:
            whole.update(more)
        for used in (all_out, all_in):
            self.rows.at_most(_plus(used, whole, -1.0), float(plain_ms.sum()))

    def _add_host_time(self) -> None:
        """Row ``total`` of the host."""
        problem = self._problem
        spent = {
            one: problem.host_us(number, problem.leave_kind(problem.candidates[number])) / 1e3
            for number, one in self._swap.items()
        }
        spent |= dict.fromkeys([*self._replay.values(), *self._drop.values()], problem.trace.host.recompute_us / 1e3)
        whole = dict.fromkeys(self._waits, 1.0)
        for more in self._spans()[1]:
            whole.update(more)
        left_us = float(self._durations_us.sum()) - sum(problem.trace.host.op_us)
        self.rows.at_most(_plus(spent, whole, -1.0), left_us / 1e3)

    def _add_late_copies(self, out_rate: float, in_rate: float, replays: list[dict[int, float]]) -> None:
        """What leaves just before a checkpoint is not gone there; what is needed just after one is there already."""
        durations_us, places = self._durations_us, len(self._durations_us)
        ends_ms = np.cumsum(durations_us) / 1e3
        starts_ms = ends_ms - durations_us / 1e3
        late: list[dict[int, float]] = [{} for _ in range(self._count)]
        soon: list[dict[int, float]] = [{} for _ in range(self._count)]
        for number, variable in self._swap.items():
            one = self._problem.candidates[number]
            size = one.bytes / _MIB
            j = self._next[one.out_after + 1]
            if not one.unchanged and j < self._count:
                late[j][variable] = size - out_rate * float(starts_ms[self._at[j]] - ends_ms[one.out_after])
            if one.back_at is not None:
                back_at = min(one.back_at, self._earliest[number]) if one.back_at < places else one.back_at - places
                j = self._next[back_at] - 1
                if 0 <= j < self._count:
                    soon[j][variable] = size - in_rate * float(starts_ms[back_at] - starts_ms[self._at[j]])
        for j in range(self._count):
            for rest, variables, rate, at in (
                (late[j], self._backlog, out_rate, j),
                (soon[j], self._ahead, in_rate, j + 1),
            ):
                row = {variable: size for variable, size in rest.items() if size > 0}
                if row:
                    span = {self._waits[at]: 1.0, **replays[at]}
                    self.rows.at_most(_plus({**row, variables[j]: -1.0}, span, -rate), 0.0)

    def _spans(self) -> tuple[Floats, list[dict[int, float]]]:
        """The ops' time before each checkpoint and after the last, and the replays that may happen there."""
        places = np.arange(len(self._problem.durations_us))
        group = np.searchsorted(self._at, places, side="right")
        plain = np.bincount(group, weights=self._durations_us, minlength=self._count + 1) / 1e3
        replays: list[dict[int, float]] = [{} for _ in range(self._count + 1)]
        for number, variable in self._replay.items():
            replay = self._problem.candidates[number].replay
            assert replay is not None
            replays[self._next[self._earliest[number] + 1]][variable] = replay.own_us / 1e3
        for storage, variable in self._drop.items():
            replays[self._next[self._spent[storage].needed + 1]][variable] = self._spent[storage].duration_us / 1e3
        return plain, replays

    def _add_spent(self, asks: list[Ask]) -> None:
        """A spent input is held or replayed for each recipe that is used, or comes back if it is swapped.

        To plan, it is not swapped: nothing says when it would have to come back.
        """
        tails = {one.storage: number for number, one in enumerate(self._problem.candidates) if one.back_at is None}
        for ask in asks:
            asking = self._replay.get(ask.candidate) if ask.candidate is not None else self._drop.get(ask.reader or 0)
            if asking is None or (ask.late is not None and ask.late not in self._early):
                continue
            row, room = {asking: 1.0, self._hold[ask.given][ask.end]: -1.0}, 0.0
            if ask.given in self._drop:
                row[self._drop[ask.given]] = -1.0
            tail = self._swap.get(tails.get(ask.given, -1))
            if tail is not None and not self._careful:
                row[tail] = -1.0
            if ask.late is not None:
                row[self._early[ask.late]] = -1.0
                if ask.candidate is None and not ask.alone:
                    row[self._replay[ask.late]], room = 1.0, 1.0
            self.rows.at_most(row, room)
        if self._careful:
            self._add_tails(tails)

    def _add_tails(self, tails: Mapping[int, int]) -> None:
        """What leaves after its last use is not held; if it is swapped, it is not made again either."""
        for storage, held in self._hold.items():
            tail = tails.get(storage, -1)
            gone = [given[tail] for given in (self._swap, self._replay) if tail in given]
            if gone:
                self.rows.at_most(dict.fromkeys([next(iter(held.values())), *gone], 1.0), 1.0)
            if tail in self._swap and storage in self._drop:
                self.rows.at_most({self._swap[tail]: 1.0, self._drop[storage]: 1.0}, 1.0)

    def _add_host(self, host_limit_bytes: int) -> None:
        """At each checkpoint the host holds what is swapped there."""
        steps: list[dict[int, float]] = [{} for _ in range(self._count)]
        for number, variable in self._swap.items():
            one = self._problem.candidates[number]
            self._stretch(steps, [variable], one.out_after + 1, one.end + 1, one.bytes / _MIB)
            if one.wrapped_end >= 0:
                self._stretch(steps, [variable], 0, one.wrapped_end + 1, one.bytes / _MIB)
        held = [self.rows.variable(most=host_limit_bytes / _MIB) for _ in range(self._count)]
        for place in range(self._count):
            before = {held[place - 1]: 1.0} if place else {}
            self.rows.equal({held[place]: -1.0, **before, **steps[place]}, 0.0)


def _plus(row: dict[int, float], other: dict[int, float], factor: float) -> dict[int, float]:
    found = dict(row)
    for variable, value in other.items():
        found[variable] = found.get(variable, 0.0) + factor * value
    return found
