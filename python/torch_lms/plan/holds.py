"""How long recipes hold the inputs that the program has released: what the linear program is told of it.

Note [Early and late]: a recipe holds its inputs until its storage comes back, at the next use of the storage or before,
where something that is made from it must be made again. To bound, nobody knows when. But what a plan gains from a
storage that is away, less what is held for it, changes only where a storage that shares an input may come back or has
to be back. If that is nowhere between the earliest place and the next use, the storage is worth its inputs all that
time or never. So no plan is better than the better of two: it comes back late, and its inputs are held until then, or
as early as it can, and gives no room from then on.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from torch_lms.plan.problem import Problem
from torch_lms.plan.spent import Dropped, Spent

__all__ = ["Ask", "find_asks", "find_late_asks"]


@dataclass(frozen=True, slots=True)
class Ask:
    """A spent input that has to be held, or made again.

    Attributes:
        given: the input.
        end: the place up to which it is held.
        candidate: that asks for it by its recipe; None for a spent input that is dropped.
        reader: that spent input.
        late: the candidate for which this holds only if it comes back late.
        alone: whether no other candidate may be what the reader is dropped for.
    """

    given: int
    end: int
    candidate: int | None = None
    reader: int | None = None
    late: int | None = None
    alone: bool = False


def find_asks(
    problem: Problem,
    reached: Mapping[int, set[int]],
    spent: Mapping[int, Spent],
    earliest: list[int],
    dropped: Dropped | None,
) -> list[Ask]:
    """What recipes ask for until the earliest place at which their storage may come back.

    Args:
        problem: what is asked.
        reached: by candidate that counts the spent inputs of its recipe, and those of theirs.
        spent: all spent inputs.
        earliest: the place at which each candidate may be made again.
        dropped: what is likely to be; None to bound.
    """
    asks = []
    ends: dict[int, list[int]] = defaultdict(list)
    sure: dict[int, list[int]] = defaultdict(list)
    for number, given in reached.items():
        replay = problem.candidates[number].replay
        assert replay is not None
        asks += [Ask(one, earliest[number], candidate=number) for one in replay.direct]
        for storage in given:
            ends[storage].append(earliest[number])
            if dropped is not None and number in dropped.candidates:
                sure[storage].append(earliest[number])
    for storage, one in spent.items():
        if ends[storage]:
            end = min(ends[storage]) if dropped is None else max(sure[storage] or ends[storage])
            asks += [Ask(given, end, reader=storage) for given in one.inputs]
    return asks


def find_late_asks(
    problem: Problem, reached: Mapping[int, set[int]], spent: Mapping[int, Spent], earliest: list[int]
) -> list[Ask]:
    """What recipes ask for from then on until the next use, of the candidates for which this is known.

    See Note [Early and late]. The arguments are those of `find_asks`.
    """
    turns: dict[int, list[int]] = defaultdict(list)
    roots: dict[int, int] = defaultdict(int)
    for number, given in reached.items():
        for storage in given:
            turns[storage] += (earliest[number], problem.candidates[number].end + 1)
            roots[storage] += 1
    for places in turns.values():
        places.sort()
    asks = []
    for number, given in reached.items():
        one, first = problem.candidates[number], earliest[number]
        end = one.end + 1
        if one.replay is None or first >= end or any(_turns_between(turns[storage], first, end) for storage in given):
            continue
        asks += [
            Ask(storage, end, candidate=number, late=number)
            for storage in one.replay.direct
            if _is_gone(problem, storage, first)
        ]
        for reader in sorted(given & spent.keys()):
            alone = roots[reader] == 1
            asks += [
                Ask(storage, end, reader=reader, late=number, alone=alone)
                for storage in spent[reader].inputs
                if _is_gone(problem, storage, first)
            ]
    return asks


def _turns_between(places: list[int], first: int, end: int) -> bool:
    return bisect_right(places, first) < bisect_left(places, end)


def _is_gone(problem: Problem, storage: int, place: int) -> bool:
    released = problem.trace.storages[storage].released
    return released is not None and released < place
