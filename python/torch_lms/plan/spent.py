"""Inputs that only recipes need any more, and how early a dropped storage may have to be made again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch_lms.plan.candidates import recipe_lasts, spent_inputs
from torch_lms.plan.problem import Problem

__all__ = ["Dropped", "Spent", "earliest_replays", "find_spent", "reach"]


_PLACES_KEPT = 64  # of the places at which one storage may be made again, the earliest ones


@dataclass(frozen=True)
class Spent:
    """One spent input.

    Attributes:
        storage: its id.
        droppable: whether it may be dropped and replayed too.
        duration_us: of its replay.
        needed: the earliest place at which a recipe may need it.
        inputs: the spent inputs of its own recipe.
    """

    storage: int
    droppable: bool
    duration_us: float
    needed: int
    inputs: tuple[int, ...]


@dataclass(frozen=True)
class Dropped:
    """What is likely to be dropped.

    Attributes:
        candidates: their numbers.
        spent: spent inputs, by storage.
    """

    candidates: frozenset[int] = frozenset()
    spent: frozenset[int] = frozenset()


def earliest_replays(problem: Problem, dropped: Dropped | None = None) -> list[int]:
    """For each candidate the first place at which it, or what is made from it, may be needed again.

    A storage that wraps or that nothing uses again gets the place that its stretch ends at.

    Args:
        problem: what is asked.
        dropped: what is; None if all may be that can be made again.
    """
    trace = problem.trace
    consumers: dict[int, list[int]] = defaultdict(list)
    by_storage: dict[int, list[int]] = defaultdict(list)
    for number, one in enumerate(problem.candidates):
        by_storage[one.storage].append(number)
    for number, storage in enumerate(trace.storages):
        if storage.recompute is not None and storage.movable:
            for given in set(storage.recompute.inputs):
                consumers[given].append(number)
    places = len(trace.ops)
    found = [places if one.back_at is None else min(one.back_at, places) for one in problem.candidates]
    passed: dict[int, list[int]] = {}  # places at which each storage may be made again
    order = sorted(consumers.keys() | by_storage.keys(), key=lambda number: -(trace.storages[number].settled or 0))
    for made in order:
        later = [place for consumer in consumers.get(made, ()) for place in passed.get(consumer, ())]
        own = by_storage.get(made, ())
        for number in own:
            one = problem.candidates[number]
            found[number] = min([found[number], *(place for place in later if place > one.out_after)])
        mine = {found[number] for number in own if _may_be_dropped(problem, number, dropped)}
        released = trace.storages[made].released
        if released is not None and (dropped is None or made in dropped.spent):
            mine |= {min((place for place in later if place > released), default=places)}
        passed[made] = sorted(mine)[:_PLACES_KEPT]
    return found


def _may_be_dropped(problem: Problem, number: int, dropped: Dropped | None) -> bool:
    return problem.candidates[number].replay is not None and (dropped is None or number in dropped.candidates)


def find_spent(problem: Problem, earliest: list[int], reached: Mapping[int, Collection[int]]) -> Mapping[int, Spent]:
    """All spent inputs that candidates' recipes may need, those of their own recipes included.

    Args:
        problem: what is asked.
        earliest: the place at which each candidate may be made again.
        reached: these inputs by candidate, see `reach`.
    """
    trace = problem.trace
    needed: dict[int, int] = {}
    for number, given in reached.items():
        for storage in given:
            needed[storage] = min(needed.get(storage, earliest[number]), earliest[number])
    found = {}
    for storage, place in needed.items():
        recipe = trace.storages[storage].recompute
        droppable = trace.storages[storage].movable and recipe is not None and recipe_lasts(trace, storage, place)
        inputs = tuple(one for one in spent_inputs(trace, storage, place) if one in needed) if droppable else ()
        found[storage] = Spent(storage, droppable, recipe.duration_us if recipe and droppable else 0.0, place, inputs)
    return found


def reach(problem: Problem, number: int) -> set[int]:
    """The spent inputs of a candidate's recipe, and those of theirs.

    Args:
        problem: what is asked.
        number: of the candidate.
    """
    one = problem.candidates[number]
    place = one.back_at or 0
    stack = [] if one.replay is None else list(one.replay.direct)
    seen = set(stack)
    while stack:
        storage = stack.pop()
        if problem.trace.storages[storage].movable and recipe_lasts(problem.trace, storage, place):
            more = [given for given in spent_inputs(problem.trace, storage, place) if given not in seen]
            seen.update(more)
            stack.extend(more)
    return seen
