"""Storages that are copied instead of made again, where what that takes with it has no room."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from torch_lms.plan.decision import RECOMPUTE
from torch_lms.plan.problem import Choices, Problem

__all__ = ["copied_instead"]


def copied_instead(problem: Problem, choices: Choices, excess_bytes: NDArray[np.float64]) -> Choices:
    """The choices, but for each place above the limit without the replay that takes most room there.

    Args:
        problem: what is asked.
        choices: made before.
        excess_bytes: above the limit at each place, with these choices.
    """
    replays, places = _Replays(problem, choices), np.flatnonzero(excess_bytes)
    most_bytes, most = np.zeros(len(places)), np.full(len(places), -1)
    for number, kind in choices.items():
        if kind != RECOMPUTE or not problem.candidates[number].swappable:
            continue
        taken_bytes = np.zeros(len(places))
        for first, end, size_bytes in replays.takes(number):
            low, high = np.searchsorted(places, (first, end))
            taken_bytes[low:high] += size_bytes
        more = taken_bytes > most_bytes
        most_bytes[more], most[more] = taken_bytes[more], number
    copied = {number: problem.leave_kind(problem.candidates[number]) for number in map(int, most) if number >= 0}
    return {**choices, **copied}


class _Replays:
    """What choices have made again, and what room that takes which a copy would not."""

    def __init__(self, problem: Problem, choices: Choices) -> None:
        self._problem, demand = problem, problem.demand(choices)
        self._came: dict[int, set[int]] = defaultdict(set)  # by storage, places
        for storage, places in demand.arrivals.items():
            self._came[storage].update(places)
        for place, storages in demand.replayed.items():
            for storage in storages:
                self._came[storage].add(place)
        self._away: dict[int, list[int]] = defaultdict(list)  # choices by storage
        for number in choices:
            self._away[problem.candidates[number].storage].append(number)

    def takes(self, number: int) -> Iterator[tuple[int, int, int]]:
        """From which place on and until before which, and how many bytes: itself where it is there too early, too."""
        one, storages = self._problem.candidates[number], self._problem.trace.storages
        recipe, last = storages[one.storage].recompute, self._last(number)
        if recipe is None or one.replay is None:
            return
        for held in one.replay.held:
            if (released := storages[held].released) is not None:
                yield max(released, one.out_after) + 1, last + 1, storages[held].bytes
        for made_at in self._came[one.storage]:
            if not one.out_after < made_at <= last:
                continue
            yield made_at, last + 1, one.bytes
            yield made_at, made_at + 1, recipe.working_bytes
            for given in recipe.inputs:
                if made_at in self._came[given]:
                    yield from ((made_at, end, storages[given].bytes) for end in self._ends(given, made_at))

    def _ends(self, storage: int, place: int) -> Iterator[int]:
        """Of the stretches in which it is away by choice, but came at a place."""
        for other in self._away[storage]:
            if self._problem.candidates[other].out_after < place < self._last(other):
                yield self._last(other)

    def _last(self, number: int) -> int:
        """The place at which it is back."""
        back_at = self._problem.candidates[number].back_at
        return len(self._problem.durations_us) if back_at is None else back_at
