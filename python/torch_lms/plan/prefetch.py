"""When copies in may begin: as late as they can to be there in time, or as soon as the link is free for them.

Note [Late and in turn]: late copies leave memory to what else may need it, and where compute does not wait for them
nothing is better. Where it does, as in a forward that streams its weights, they are in each other's way: of those that
are placed first, the last ones of a cycle, each takes memory for as long as the link needs for all that come before it,
which then come one by one. In turn each begins as soon as there is memory, in the order of need, and takes none before
the link is about to be free. The simulator judges.

Note [One after the other]: what an op needs is made again and copied in one after the other, and what is there from the
beginning can be too much for a replay that comes first. Then the largest copies come when they are needed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from torch_lms.plan.decision import RECOMPUTE
from torch_lms.plan.demand import Demand
from torch_lms.plan.problem import Problem
from torch_lms.plan.residency import steady_cycle

__all__ = ["place_in_turn", "place_prefetches"]

Floats = NDArray[np.float64]
_CYCLES = 3  # until what one leaves to the next is what it has found


def place_prefetches(
    problem: Problem,
    choices: Mapping[int, str],
    *,
    lead_us: float = 0.0,
    wait_us: Floats | None = None,
) -> dict[int, int]:
    """For each swapped choice the place after which it may come in.

    Args:
        problem: what is asked.
        choices: made for its candidates.
        lead_us: by which copies should end before they must.
        wait_us: by which compute is known to wait before each op; nothing by default.

    Returns:
        Places by candidate. A place behind the one that needs the storage lies in the cycle before.
    """
    places, demand = len(problem.durations_us), problem.demand(choices)
    before_us = demand.replay_us + (0.0 if wait_us is None else wait_us)
    # Two cycles one after the other: what the second needs may begin to come in during the first.
    spent_us = np.tile(problem.durations_us + before_us, 2)
    ends_us = np.cumsum(spent_us)
    memory = np.tile(demand.memory_bytes, 2)
    free_us = np.inf
    placed: dict[int, int] = {}
    needs = sorted(_needs(problem, choices, demand), reverse=True)
    for needed, number in needs:
        size = problem.candidates[number].bytes
        free_us = min(free_us, float(ends_us[needed - 1]) - lead_us) - problem.trace.link.in_us(size)
        earliest = _earliest(problem.candidates[number].out_after, needed, places)
        begin = int(np.searchsorted(ends_us, free_us, side="right")) - 1
        begin = min(max(begin, earliest), needed - 1)
        full = np.flatnonzero(memory[begin + 1 : needed] + size > problem.limit_bytes)
        if len(full):
            begin += int(full[-1]) + 1
        _charge(memory, begin + 1, needed, size)
        placed[number] = begin % places
    return _without_those_in_the_way(problem, choices, demand, placed, needs)


def place_in_turn(problem: Problem, choices: Mapping[int, str]) -> dict[int, int]:
    """The same in the order of need, each as soon as it can; see Note [Late and in turn].

    Args:
        problem: what is asked.
        choices: made for its candidates.
    """
    places, demand = len(problem.durations_us), problem.demand(choices)
    needs = sorted(_needs(problem, choices, demand))
    turns = _Turns(problem, demand, needs)
    for place in range(_CYCLES * places):
        turns.run(place)
        turns.begin_after(place)
    return _without_those_in_the_way(problem, choices, demand, turns.placed, needs)


class _Turns:
    """Compute and the link, cycle after cycle, while copies in begin in turn.

    Args:
        problem: what is asked.
        demand: of the choices.
        needs: those of `_needs`, in order.

    Attributes:
        placed: by candidate, the place after which it comes in in the last cycle.
    """

    def __init__(self, problem: Problem, demand: Demand, needs: list[tuple[int, int]]) -> None:
        self.placed: dict[int, int] = {}
        self._problem, self._link = problem, problem.trace.link
        self._places = len(problem.durations_us)
        self._spent_us = problem.durations_us + demand.replay_us
        self._memory = np.tile(demand.memory_bytes, _CYCLES)
        self._needs = [
            (needed + cycle * self._places, number) for cycle in range(-1, _CYCLES - 1) for needed, number in needs
        ]
        self._ahead_us = max((self._in_us(number) for _, number in needs), default=0.0)
        self._ends_us: list[float] = []  # of the copies that have begun
        self._waited = 0  # copies that compute has waited for
        self._now_us = self._free_us = 0.0

    def run(self, place: int) -> None:
        """An op, and before it the copies that it needs; those begin now that have not before."""
        while self._waited < len(self._needs) and self._needs[self._waited][0] == place:
            if self._waited == len(self._ends_us):
                self.placed.pop(self._needs[self._waited][1], None)
                self._begin()
            self._now_us = max(self._now_us, self._ends_us[self._waited])
            self._waited += 1
        self._now_us += float(self._spent_us[place % self._places])

    def begin_after(self, place: int) -> None:
        """The copies for which there is memory from an op on, while the link is not busy for long."""
        while len(self._ends_us) < len(self._needs) and self._free_us <= self._now_us + self._ahead_us:
            needed, number = self._needs[len(self._ends_us)]
            one, between = self._problem.candidates[number], self._memory[place + 1 : needed]
            away = _earliest(one.out_after, needed, self._places) <= place < needed - 1
            if not away or (between + one.bytes > self._problem.limit_bytes).any():
                return
            between += one.bytes
            self.placed[number] = place % self._places
            self._begin()

    def _begin(self) -> None:
        _, number = self._needs[len(self._ends_us)]
        self._free_us = max(self._free_us, self._now_us) + self._in_us(number)
        self._ends_us.append(self._free_us)

    def _in_us(self, number: int) -> float:
        return self._link.in_us(self._problem.candidates[number].bytes)


def _without_those_in_the_way(
    problem: Problem, choices: Mapping[int, str], demand: Demand, placed: dict[int, int], needs: list[tuple[int, int]]
) -> dict[int, int]:
    """See Note [One after the other]."""
    by_place: dict[int, list[int]] = defaultdict(list)
    for needed, number in needs:
        if (place := needed % len(problem.durations_us)) in demand.replayed:
            by_place[place].append(number)
    for numbers in by_place.values():
        numbers.sort(key=lambda number: problem.candidates[number].bytes)
    fits = demand.memory_bytes <= problem.limit_bytes
    while by_place:
        memory = np.array(steady_cycle(problem.trace, problem.decisions(choices, placed)).memory_bytes)
        above = fits & (memory > problem.limit_bytes)
        full = [place for place in map(int, np.flatnonzero(above)) if by_place.get(place)]
        if not full:
            break
        for place in full:
            del placed[by_place[place].pop()]
    return placed


def _charge(memory: Floats, first: int, end: int, size_bytes: int) -> None:
    """Counts a storage from a place to before another, in both cycles."""
    places = len(memory) // 2
    for shift in (0, places, -places):
        low, high = max(first + shift, 0), min(end + shift, 2 * places)
        if low < high:
            memory[low:high] += size_bytes


def _earliest(out_after: int, needed: int, places: int) -> int:
    """The last time, before it is needed, that the storage leaves."""
    return out_after + places * ((needed - 1 - out_after) // places)


def _needs(problem: Problem, choices: Mapping[int, str], demand: Demand) -> list[tuple[int, int]]:
    """Place in the second cycle and candidate, for what comes in."""
    places = len(problem.durations_us)
    found = []
    for number, kind in choices.items():
        one = problem.candidates[number]
        arrivals = demand.arrivals.get(one.storage)
        if kind == RECOMPUTE or one.back_at is None or not arrivals:
            continue
        after = [place for place in arrivals if place > one.out_after]
        needed = after[0] if after else arrivals[0]
        if one.back_at >= places or after:
            found.append((needed + places, number))
    return found
