"""When copies in may begin: as late as they can to be there in time, no earlier than memory allows.

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

__all__ = ["place_prefetches"]

Floats = NDArray[np.float64]


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
