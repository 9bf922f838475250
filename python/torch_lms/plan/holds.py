"""How long recipes hold the inputs that the program has released: what the linear program is told of it.

Note [Early and late]: a recipe holds its inputs until its storage comes back: at the next use of the storage, or earlier,
where something that is made from it must be made again. To bound, nobody knows when. But what a plan gains from a
storage that is away and loses by what is held for it changes only where a storage that shares an input may come back, or
may no longer be away. If this happens nowhere between the earliest place and the next use, then for all of this time the
storage is worth its inputs or it is not, and no plan is better than the better of two: it comes back late, and its
inputs are held until then, or as early as it can, and gives no room from then on.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torch_lms.plan.problem import Problem
from torch_lms.plan.spent import Dropped, Spent, reach

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
    problem: Problem, useful: Iterable[int], spent: Mapping[int, Spent], earliest: list[int], dropped: Dropped | None
) -> list[Ask]:
    """What recipes ask for until the earliest place at which their storage may come back.

    Args:
        problem: what is asked.
        useful: the candidates that count.
        spent: all spent inputs.
        earliest: the place at which each candidate may be made again.
        dropped: what is likely to be; None to bound.
    """
    asks = []
    ends: dict[int, list[int]] = defaultdict(list)
    sure: dict[int, list[int]] = defaultdict(list)
    for number in useful:
        replay = problem.candidates[number].replay
        if replay is None:
            continue
        asks += [Ask(given, earliest[number], candidate=number) for given in replay.direct]
        for storage in reach(problem, number):
            ends[storage].append(earliest[number])
            if dropped is not None and number in dropped.candidates:
                sure[storage].append(earliest[number])
    for storage, one in spent.items():
        if ends[storage]:
            end = min(ends[storage]) if dropped is None else max(sure[storage] or ends[storage])
            asks += [Ask(given, end, reader=storage) for given in one.inputs]
    return asks


def find_late_asks(
    problem: Problem, useful: Collection[int], spent: Mapping[int, Spent], earliest: list[int]
) -> list[Ask]:
    """What recipes ask for from then on until the next use, of the candidates for which this is known.

    See Note [Early and late].
    """
    candidates, storages = problem.candidates, problem.trace.storages
    reached = {
        number: reach(problem, number)
        for number in useful
        if candidates[number].replay is not None and candidates[number].back_at is not None
    }
    turns: dict[int, list[int]] = defaultdict(list)
    roots: dict[int, int] = defaultdict(int)
    for number, given in reached.items():
        for storage in given:
            turns[storage] += (earliest[number], candidates[number].end + 1)
            roots[storage] += 1
    for places in turns.values():
        places.sort()
    asks = []
    for number, given in reached.items():
        first, end = earliest[number], candidates[number].end + 1
        if first >= end or any(
            bisect_right(turns[storage], first) < bisect_left(turns[storage], end) for storage in given
        ):
            continue
        held = {one for one in given if (released := storages[one].released) is not None and released < first}
        replay = candidates[number].replay
        assert replay is not None
        asks += [Ask(one, end, candidate=number, late=number) for one in replay.direct if one in held]
        for reader in given & spent.keys():
            for one in spent[reader].inputs:
                if one in held:
                    asks.append(Ask(one, end, reader=reader, late=number, alone=roots[reader] == 1))
    return asks
