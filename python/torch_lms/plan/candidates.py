"""Where storages may be away: every stretch between two uses, with what leaving costs and whom it keeps alive.

A storage that the program has released before a recipe needs it is called a spent input here: the recipe either keeps
it alive, or drops it too and replays it first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from torch_lms.plan.trace import Trace, TraceStorage

__all__ = ["Candidate", "CandidateArrays", "Replay", "find_candidates", "recipe_lasts", "spent_inputs", "with_dropped"]

_LEAST_PLACES_AWAY = 1


@dataclass(frozen=True, slots=True)
class Replay:
    """How a candidate comes back by recompute.

    Attributes:
        own_us: of its own op.
        held: spent inputs that stay on the device for it.
        dropped: spent inputs that are dropped too, and replayed before it.
        total_us: with these replays.
        net_bytes: that its drop saves, less the spent inputs that it holds.
        direct: all spent inputs of its own recipe.
    """

    own_us: float
    held: tuple[int, ...]
    dropped: tuple[int, ...]
    total_us: float
    net_bytes: int
    direct: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A stretch of places in which nothing uses a storage.

    Attributes:
        storage: its id.
        bytes: its size.
        out_after: the last place that uses it before the stretch.
        back_at: the next place that uses it, counted on into the next cycle where it wraps; None if nothing does.
        end: the last place of the stretch, at most the last of the cycle.
        wrapped_end: the last place at the start of the cycle that belongs to the stretch; -1 if none does.
        swappable: whether it may leave by a copy.
        unchanged: whether the host's copy is as good, so that leaving costs nothing.
        replay: how it is made again; None if it cannot be.
    """

    storage: int
    bytes: int
    out_after: int
    back_at: int | None
    end: int
    wrapped_end: int
    swappable: bool
    unchanged: bool
    replay: Replay | None

    @property
    def places(self) -> tuple[slice, ...]:
        """Of the stretch: in the cycle, and at its start where it wraps."""
        places = slice(self.out_after + 1, self.end + 1)
        return (places,) if self.wrapped_end < 0 else (places, slice(0, self.wrapped_end + 1))


class CandidateArrays:
    """Figures of all candidates as arrays, one element each.

    Attributes:
        size_bytes: of the storages.
        first: place of the stretch.
        end: one after the last place of the stretch.
        wrapped_end: one after the last place of its part at the start of the cycle; 0 if there is none.
    """

    def __init__(self, candidates: list[Candidate]) -> None:
        self.size_bytes: NDArray[np.float64] = np.array([one.bytes for one in candidates], dtype=np.float64)
        self.first: NDArray[np.int64] = np.array([one.out_after + 1 for one in candidates], dtype=np.int64)
        self.end: NDArray[np.int64] = np.array([one.end + 1 for one in candidates], dtype=np.int64)
        self.wrapped_end: NDArray[np.int64] = np.array([one.wrapped_end + 1 for one in candidates], dtype=np.int64)

    def sums(self, per_place: NDArray[np.float64]) -> NDArray[np.float64]:
        """For each candidate the sum of what the places of its stretch have."""
        total = np.concatenate(([0.0], np.cumsum(per_place)))
        found: NDArray[np.float64] = total[self.end] - total[self.first] + total[self.wrapped_end]
        return found


def find_candidates(trace: Trace, *, swap: bool, recompute: bool) -> list[Candidate]:
    """All stretches in which storages of a trace may be away.

    Args:
        trace: of the program.
        swap: whether storages may leave by a copy.
        recompute: whether they may be dropped and made again.
    """
    found = []
    for number, storage in enumerate(trace.storages):
        if not storage.movable or not storage.bytes:
            continue
        stretches = list(_stretches(trace, storage))
        settled = storage.settled or 0
        longest = max(
            (end - before for before, back_at, end, _ in stretches if back_at is not None and before >= settled),
            default=0,
        )
        for out_after, back_at, end, wrapped_end in stretches:
            # A tail of a storage that is never released may be read after the cycle. Short stretches are not worth a
            # replay, which would take its inputs along.
            worth = end - out_after == longest if back_at is not None else storage.released is not None
            able = recompute and worth and out_after >= settled
            replay = _replay(trace, number, back_at, end) if able else None
            if swap or replay is not None:
                unchanged = storage.lasting and not storage.writes
                found.append(
                    Candidate(
                        number, storage.bytes, out_after, back_at, end, wrapped_end, swap, swap and unchanged, replay
                    )
                )
    return found


def _stretches(trace: Trace, storage: TraceStorage) -> Iterator[tuple[int, int | None, int, int]]:
    places = ([] if storage.producer is None else [storage.producer]) + list(storage.uses)
    for before, after in pairwise(places):
        if after - before > _LEAST_PLACES_AWAY:
            yield before, after, after - 1, -1
    last = len(trace.ops) - 1
    if storage.lasting:
        if not places:
            yield 0, None, last, 0
        elif places[-1] < last or places[0] > 0:
            yield places[-1], places[0] + len(trace.ops), last, places[0] - 1
    elif places and not storage.recurring:
        end = last if storage.released is None else storage.released
        if end > places[-1]:
            yield places[-1], None, end, -1


def _replay(trace: Trace, number: int, back_at: int | None, end: int) -> Replay | None:
    recipe = trace.storages[number].recompute
    if recipe is None or not recipe_lasts(trace, number, end):
        return None
    size = trace.storages[number].bytes - recipe.outside_bytes
    if back_at is None:
        return Replay(0.0, (), (), 0.0, max(0, size), ())
    direct = spent_inputs(trace, number, back_at)
    dropped, held = _close(trace, direct, back_at)
    held_bytes = sum(trace.storages[one].bytes for one in held)
    dropping_us = recipe.duration_us + sum(_duration_us(trace, one) for one in dropped)
    dropping = Replay(recipe.duration_us, held, dropped, dropping_us, size - held_bytes, direct)
    direct_bytes = sum(trace.storages[one].bytes for one in direct)
    holding = Replay(recipe.duration_us, direct, (), recipe.duration_us, size - direct_bytes, direct)
    usable = [way for way in (dropping, holding) if way.net_bytes > 0]
    return min(usable, key=lambda way: way.total_us / way.net_bytes) if usable else None


def with_dropped(trace: Trace, candidate: Candidate, spent: Collection[int]) -> Replay | None:
    """A candidate's replay if of the spent inputs these are dropped too, and all others held."""
    replay = candidate.replay
    if replay is None or candidate.back_at is None or not replay.direct:
        return replay
    dropped: dict[int, None] = {}
    held: dict[int, None] = {}
    stack = list(replay.direct)
    while stack:
        one = stack.pop()
        if one in dropped or one in held:
            continue
        if one in spent:
            dropped[one] = None
            stack.extend(spent_inputs(trace, one, candidate.back_at))
        else:
            held[one] = None
    recipe = trace.storages[candidate.storage].recompute
    size = candidate.bytes - (0 if recipe is None else recipe.outside_bytes)
    held_bytes = sum(trace.storages[one].bytes for one in held)
    total_us = replay.own_us + sum(_duration_us(trace, one) for one in dropped)
    return Replay(replay.own_us, tuple(held), tuple(dropped), total_us, size - held_bytes, replay.direct)


def _duration_us(trace: Trace, storage: int) -> float:
    recipe = trace.storages[storage].recompute
    return 0.0 if recipe is None else recipe.duration_us


def recipe_lasts(trace: Trace, number: int, until: int) -> bool:
    """Whether nothing writes a recipe's inputs from the op on to a place."""
    storage = trace.storages[number]
    if storage.recompute is None or storage.producer is None:
        return False
    for given in storage.recompute.inputs:
        writes = trace.storages[given].writes
        at = bisect_left(writes, storage.producer)
        if at < len(writes) and writes[at] <= until:
            return False
    return True


def spent_inputs(trace: Trace, number: int, place: int) -> tuple[int, ...]:
    """Inputs of a storage's recipe that the program has released before a place."""
    recipe = trace.storages[number].recompute
    assert recipe is not None
    released = ((given, trace.storages[given].released) for given in dict.fromkeys(recipe.inputs))
    return tuple(given for given, last in released if last is not None and last < place)


def _close(trace: Trace, direct: tuple[int, ...], place: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Spent inputs to drop, with those of their own recipes, and those that cannot be dropped."""
    dropped: dict[int, None] = {}
    held: dict[int, None] = {}
    stack = list(direct)
    while stack:
        one = stack.pop()
        if one in dropped or one in held:
            continue
        if trace.storages[one].movable and recipe_lasts(trace, one, place):
            dropped[one] = None
            stack.extend(spent_inputs(trace, one, place))
        else:
            held[one] = None
    return tuple(dropped), tuple(held)
