"""Runs of nodes that a stage may compute again, or whose saved storages it may swap: what each gives and costs.

Note [Segments]: a model is halved again and again where the fewest bytes cross, near the middle of what it saves for
backward, until what would cross is more than a quarter of what the part saves. Cuts lie only where the graph's order
has no unit on both sides, so that a segment's nodes follow each other in the generated code. A stage has the segments
that lie in it whole.

A storage is given up with a segment if no node outside saves it and no border of the segment carries it. What a border
carries in is needed to compute the segment again. Where nobody saves it, it is held for that, so it is taken off.

A segment that is computed again must find what it found before. So a node that changes memory, the nodes that made that
memory, and all that the change has to come after or before (`CostNode.not_before`) must be in one segment; where they
are not, none of their segments is computed again. A node that changes a buffer or an input is never in such a segment.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from torch_lms.partition.costs import CostNode
from torch_lms.partition.offers import Offers, Segment
from torch_lms.partition.sequence import UnitSequence
from torch_lms.partition.units import MODEL_INPUT, Units, Value

__all__ = ["RUNS", "find_segments", "graph_order", "offers_in", "offers_of"]

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

RUNS = (2, 4)  # parts of a larger segment; see Note [Runs] in ``offers``
_MOST_SEGMENTS = 128
_NEAR_MIDDLE = 0.3  # share of what is saved that each half has at least
_WIDEST_BORDER = 0.25  # of what a part saves


def offers_of(sequence: UnitSequence, length: int = 1) -> Offers:
    """All segments, in an order of the units, and all runs of so many of them."""
    found = find_segments(sequence.units, length)
    places = [sequence.position[list(one.units)] for one in found]
    return Offers(
        segments=found,
        first=np.array([one.min() for one in places], dtype=np.int64),
        end=np.array([one.max() + 1 for one in places], dtype=np.int64),
        length=length,
    )


def offers_in(units: Units, stage_of_unit: Ints, stage: int, length: int = 1) -> Offers:
    """Those of one stage, which goes from cut 0 to cut 1: segments, or runs of so many, one after the other."""
    found = tuple(one for one in find_segments(units, length) if (stage_of_unit[list(one.units)] == stage).all())
    count = len(found)
    offers = Offers(segments=found, first=np.zeros(count, np.int64), end=np.ones(count, np.int64), length=length)
    return offers.within(0, 1)


@lru_cache(maxsize=48)
def find_segments(units: Units, length: int = 1) -> tuple[Segment, ...]:
    """The segments of a graph that give something, in its order; see Note [Segments].

    Args:
        units: of the graph.
        length: if that is more than 1, there are all runs of so many that follow each other as well.
    """
    parts = _parts(units)
    alone = {part: one for part in range(parts.count) if (one := parts.run(part, part + 1)).saved_bytes > 0}
    found = []
    for number, (part, one) in enumerate(alone.items()):
        found.append(replace(one, part=number))
        last = list(alone)[number + length - 1 : number + length]
        if length > 1 and last:
            found.append(replace(parts.run(part, last[0] + 1), part=number, parts=length))
    return tuple(one for one in found if one.saved_bytes > 0)


@lru_cache(maxsize=16)
def _parts(units: Units) -> _Parts:
    ranges = _Halving(units)
    return _Parts(units, ranges.order, ranges.found())


def graph_order(units: Units) -> Ints:
    """Units by their first nodes."""
    place = {node.name: index for index, node in enumerate(units.graph.nodes)}
    first = [min(place[name] for name in names) for names in units.members]
    return np.array(sorted(range(len(units)), key=first.__getitem__), dtype=np.int64)


class _Halving:
    """Cuts units, in the graph's order, where few bytes cross."""

    def __init__(self, units: Units) -> None:
        place = {node.name: index for index, node in enumerate(units.graph.nodes)}
        ends = [[place[name] for name in units.members[unit]] for unit in range(len(units))]
        self.order = graph_order(units)
        last = np.maximum.accumulate([max(ends[unit]) for unit in self.order])
        first = np.array([min(ends[unit]) for unit in self.order])
        self._between = np.concatenate([[False], last[:-1] < first[1:], [False]])
        sequence = UnitSequence(units, self.order)
        self._crossing = sequence.cut_forward_bytes
        seen: set[str] = set()
        sizes = []
        for unit in self.order:
            new = set(units.nodes[unit].saved) - seen
            seen |= new
            sizes.append(sum(units.graph.storage_bytes[id_] for id_ in new))
        self._saved = np.concatenate([[0.0], np.cumsum(sizes)])

    def found(self) -> list[tuple[int, int]]:
        """First and end of each part, as places in the order."""
        whole = (0, len(self.order))
        open_ = [(-self._bytes(*whole), whole)]
        done: list[tuple[int, int]] = []
        while open_ and len(open_) + len(done) < _MOST_SEGMENTS:
            _, (first, end) = heapq.heappop(open_)
            cut = self._narrowest(first, end)
            if cut is None:
                done.append((first, end))
            else:
                for part in ((first, cut), (cut, end)):
                    heapq.heappush(open_, (-self._bytes(*part), part))
        return sorted([*done, *(part for _, part in open_)])

    def _bytes(self, first: int, end: int) -> float:
        return float(self._saved[end] - self._saved[first])

    def _narrowest(self, first: int, end: int) -> int | None:
        total = self._bytes(first, end)
        if total <= 0:
            return None
        share = (self._saved[first : end + 1] - self._saved[first]) / total
        near = self._between[first : end + 1] & (share >= _NEAR_MIDDLE) & (share <= 1 - _NEAR_MIDDLE)
        cuts = np.flatnonzero(near)
        if not len(cuts):
            return None
        crossing = self._crossing[first + cuts]
        best = int(np.lexsort((np.abs(share[cuts] - 0.5), crossing))[0])
        return None if crossing[best] > total * _WIDEST_BORDER else int(first + cuts[best])


def _again_us(nodes: Sequence[CostNode], outputs: AbstractSet[str]) -> float:
    """Up to the last node that saves something: without it if that is what comes in, which is saved before it runs.

    Args:
        nodes: of the segment, in order.
        outputs: ids of the storages that nodes give to others: what else a node saves is made while it runs, as within
            a whole module.
    """
    last = max((index for index, node in enumerate(nodes) if node.saved), default=-1)
    counted = nodes[: last + 1]
    ends = counted[-1] if counted else None
    if ends and ends.output_storages and set(ends.saved) <= outputs - set(ends.output_storages):
        counted = counted[:-1]
    return sum(node.forward_us for node in counted)


class _Parts:
    """Segments of given parts of an order, and of runs of these.

    Attributes:
        count: of the parts.
    """

    def __init__(self, units: Units, order: Ints, parts: list[tuple[int, int]]) -> None:
        self.count = len(parts)
        self._units = units
        self._place = {node.name: index for index, node in enumerate(units.graph.nodes)}
        self._outputs = {id_ for node in units.graph.nodes for id_ in node.output_storages}
        self._members = [order[first:end] for first, end in parts]
        self._part_of = {int(unit): index for index, own in enumerate(self._members) for unit in own}
        self._saved = [{id_ for unit in own for id_ in units.nodes[unit].saved} for own in self._members]
        self._savers = Counter(id_ for own in self._saved for id_ in own)
        self._values: list[list[tuple[Value, int | None, set[int | None]]]] = [[] for _ in parts]  # that each touches
        for value in units.values:
            source = self._part_of.get(value.producer)
            readers = {self._part_of.get(user) for user in value.consumers}
            for part in {source, *readers} - {None}:
                assert part is not None
                self._values[part].append((value, source, readers))
        self._bound = list(self._together())

    def run(self, first: int, end: int) -> Segment:
        """Of some parts that follow each other, as one."""
        run = range(first, end)
        units, sizes = self._units, self._units.graph.storage_bytes
        own = [int(unit) for part in run for unit in self._members[part]]
        savers = Counter(id_ for part in run for id_ in self._saved[part])
        crossing, unsaved_bytes = self._crossing(run)
        given_up = [id_ for id_, count in savers.items() if self._savers[id_] == count and id_ not in crossing]
        names = tuple(sorted((name for unit in own for name in units.members[unit]), key=self._place.__getitem__))
        return Segment(
            names=names,
            units=tuple(own),
            again_us=_again_us([units.graph.nodes[self._place[name]] for name in names], self._outputs),
            saved_bytes=float(sum(sizes[id_] for id_ in given_up)),
            entering_bytes=float(unsaved_bytes),
            recomputable=all(bound.isdisjoint(run) or bound.issubset(run) for bound in self._bound),
        )

    def _crossing(self, run: range) -> tuple[set[str], int]:
        """The storages that cross the borders of some parts, and the bytes that come in and that nobody saves."""
        crossing: set[str] = set()
        entering: dict[int, Value] = {}
        for value, source, readers in (one for part in run for one in self._values[part]):
            comes_in = source not in run and any(reader in run for reader in readers)
            if comes_in:
                entering[id(value)] = value
            if comes_in or any(reader not in run for reader in readers):
                crossing.update(value.storages)
        unsaved = (
            value.forward_bytes
            for value in entering.values()
            if value.producer != MODEL_INPUT and not any(id_ in self._savers for id_ in value.storages)
        )
        return crossing, sum(unsaved)

    def _together(self) -> Iterable[set[int]]:
        """The parts that a change of memory ties together: none of them runs twice without the others."""
        part_of = {name: self._part_of[unit] for unit, names in enumerate(self._units.members) for name in names}
        bound: dict[str, set[str]] = {
            node.name: {node.name, *node.writes} for node in self._units.graph.nodes if node.writes
        }
        for node in self._units.graph.nodes:
            for other in node.not_before:
                for writer, partner in ((node.name, other), (other, node.name)):
                    if writer in bound:
                        bound[writer].add(partner)
        for names in bound.values():
            yield {part_of.get(name, -1) for name in names}
