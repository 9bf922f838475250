"""Storages that are not dropped, so that making one storage again never takes a long chain of others with it.

A replay whose inputs are dropped makes these first, and they stay on the device from then on, long before the program
uses them itself. Where everything is dropped, the first replay of the backward pass would make everything again. An
anchor cuts such chains.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from heapq import heappop, heappush

from torch_lms.plan.candidates import recipe_lasts
from torch_lms.plan.problem import Problem

__all__ = ["find_anchors"]

_MOST_LINKS = 2000


def find_anchors(problem: Problem, budget_bytes: float) -> frozenset[int]:
    """Storages to keep or swap, so that even if all others are dropped no replay makes too much too early.

    Args:
        problem: what is asked.
        budget_bytes: that one replay's chain may make again before the program uses it.
    """
    chains = _Chains(problem)
    candidates = problem.candidates
    roots = [number for number, one in enumerate(candidates) if one.replay is not None and one.back_at is not None]
    for number in sorted(roots, key=lambda number: (candidates[number].back_at or 0, number)):
        chains.cut(number, budget_bytes)
    return frozenset(chains.anchors)


@dataclass
class _Chain:
    """Candidates that one replay makes again, their bytes, and those of them on which all that follow hang."""

    links: list[int] = field(default_factory=list)
    narrow: list[int] = field(default_factory=list)
    early_bytes: float = 0.0


class _Chains:
    def __init__(self, problem: Problem) -> None:
        self._problem, self._trace = problem, problem.trace
        self.anchors: set[int] = set()
        self._again: set[int] = set()  # candidates that an earlier replay has made again
        self._of_storage: dict[int, list[int]] = defaultdict(list)
        for number, one in enumerate(problem.candidates):
            if one.replay is not None and one.back_at is not None:
                self._of_storage[one.storage].append(number)

    def cut(self, root: int, budget_bytes: float) -> None:
        """Adds anchors until the chain of one candidate's replay is within the budget."""
        one = self._problem.candidates[root]
        if root in self._again or one.storage in self.anchors:
            return
        chain = self._chain(one.storage, one.back_at or 0, budget_bytes)
        while chain.early_bytes > budget_bytes:
            self.anchors.add(self._best_cut(chain))
            chain = self._chain(one.storage, one.back_at or 0, budget_bytes)
        self._again.update(chain.links, (root,))

    def _best_cut(self, chain: _Chain) -> int:
        """The storage to be an anchor: a small one that is dear to replay, if one can be it alone."""
        found = []
        for number in chain.narrow or chain.links:
            one = self._problem.candidates[number]
            assert one.replay is not None
            found.append((one.bytes if chain.narrow else 0, -one.replay.total_us / one.bytes, one.storage))
        return min(found)[-1]

    def _chain(self, root: int, place: int, budget_bytes: float) -> _Chain:
        """What a replay at a place makes again on its way; stops when that is above the budget.

        The last made come first, so that where nothing else is open all that follows hangs on one storage.
        """
        chain = _Chain()
        seen, heap = {root}, [(0, root)]
        while heap and chain.early_bytes <= budget_bytes and len(chain.links) < _MOST_LINKS:
            storage = heappop(heap)[1]
            number = None if storage == root else self._dropped_at(storage, place)
            if number is not None:
                if not heap:
                    chain.narrow.append(number)
                chain.links.append(number)
                chain.early_bytes += self._problem.candidates[number].bytes
            for given in self._inputs(storage):
                if given not in seen and (self._dropped_at(given, place) is not None or self._spent_at(given, place)):
                    heappush(heap, (-(self._trace.storages[given].settled or 0), given))
                seen.add(given)
        return chain

    def _inputs(self, storage: int) -> tuple[int, ...]:
        recipe = self._trace.storages[storage].recompute
        return () if recipe is None else recipe.inputs

    def _dropped_at(self, storage: int, place: int) -> int | None:
        if storage in self.anchors:
            return None
        for number in self._of_storage.get(storage, ()):
            one = self._problem.candidates[number]
            if one.out_after < place < (one.back_at or 0) and number not in self._again:
                return number
        return None

    def _spent_at(self, storage: int, place: int) -> bool:
        given = self._trace.storages[storage]
        return given.released is not None and given.released < place and recipe_lasts(self._trace, storage, place)
