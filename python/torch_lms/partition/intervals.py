"""The memory of every contiguous stage of an order, as matrices over its first and its last cut.

Note [Rectangles]: whether a stage from cut a to cut b holds something depends on a and b alone. A storage that
positions u1 < u2 < ... save is held where, for one of them, ``u(r-1) < a <= u(r)`` and ``b > u(r)``: rectangles that do
not overlap, so each storage counts once. A value made at x and last read at y is received where ``x < a <= y`` and sent
where ``a <= x < b <= y``; where a position in between saves its storage it is in the first kind already, so these
rectangles end at the next such position. All rectangles are added up by their corners and two running sums.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torch_lms.partition.costs import CostModel
from torch_lms.partition.offers import NO_OFFERS, Offers
from torch_lms.partition.relief import KEEP_ALL
from torch_lms.partition.segments import offers_of
from torch_lms.partition.sequence import UnitSequence
from torch_lms.partition.units import MODEL_INPUT

__all__ = ["StageMatrices", "parameter_matrix", "stage_matrices"]

Array = NDArray[np.float64]
Rectangle = tuple[int, int, int, int, float]  # first and last a, first and last b, inclusive; bytes


@dataclass(frozen=True, kw_only=True)
class StageMatrices:
    """For each pair of cuts, what a stage between them takes; meaningless where the second is not after the first.

    Attributes:
        static_bytes: of parameters with all that training keeps of them.
        held_bytes: for each microbatch in flight.
        transient_bytes: working space.
        offers: what stages may give up.
    """

    static_bytes: Array
    held_bytes: Array
    transient_bytes: Array
    offers: Offers = NO_OFFERS


def stage_matrices(sequence: UnitSequence, cuts: NDArray[np.int64], model: CostModel) -> StageMatrices:
    """The matrices over some cuts, in ascending order with 0 and the end among them."""
    saved = _uses(sequence, [node.saved for node in sequence.units.nodes])
    return StageMatrices(
        static_bytes=parameter_matrix(sequence, cuts, model.parameter_cost_bytes(sequence.units.graph)),
        held_bytes=_sum(_held(sequence, saved), cuts),
        transient_bytes=_largest(sequence, cuts),
        offers=NO_OFFERS if model.relief is KEEP_ALL else offers_of(sequence),
    )


def parameter_matrix(sequence: UnitSequence, cuts: NDArray[np.int64], sizes: Mapping[str, float]) -> Array:
    """For each pair of cuts, the sizes of the parameters that a stage between them reads; 0 where none is given."""
    uses = {name: at for name, at in _uses(sequence, sequence.units.parameters).items() if name in sizes}
    return _sum(_once(uses, sizes, len(sequence)), cuts)


def _uses(sequence: UnitSequence, names: Sequence[tuple[str, ...]]) -> dict[str, list[int]]:
    """The positions that name each thing, ascending."""
    uses: dict[str, list[int]] = {}
    for position, unit in enumerate(sequence.order):
        for name in dict.fromkeys(names[unit]):
            uses.setdefault(name, []).append(position)
    return uses


def _once(uses: Mapping[str, list[int]], sizes: Mapping[str, float], end: int) -> Iterator[Rectangle]:
    """Where a stage has at least one use of a thing."""
    for name, positions in uses.items():
        before = -1
        for position in positions:
            yield before + 1, position, position + 1, end, sizes[name]
            before = position


def _held(sequence: UnitSequence, saved: Mapping[str, list[int]]) -> Iterator[Rectangle]:
    end = len(sequence)
    yield from _once(saved, sequence.units.graph.storage_bytes, end)
    for value, (made, last) in zip(sequence.units.values, sequence.spans, strict=True):
        positions = sorted({use for id_ in value.storages for use in saved.get(id_, ())})
        if made == MODEL_INPUT:
            readers = {int(sequence.position[user]) if user < end else end - 1 for user in value.consumers}
            yield from _fed(sorted(readers), positions, end, value.forward_bytes)
            continue
        yield from _received(made, last, positions, end, value.forward_bytes)
        yield from _sent(made, last, positions, value.forward_bytes)


def _fed(readers: list[int], saves: list[int], end: int, nbytes: int) -> Iterator[Rectangle]:
    """Stages that read an input of the model and do not save it: those that do either, less those that save."""
    yield from _once({"": sorted({*readers, *saves})}, {"": nbytes}, end)
    yield from _once({"": saves}, {"": -nbytes}, end)


def _received(made: int, last: int, saves: list[int], end: int, nbytes: int) -> Iterator[Rectangle]:
    """Stages that begin while the value lives and end before its storage is saved."""
    before = made
    for save in saves[bisect_right(saves, made) :]:
        if before >= last:
            return
        yield before + 1, min(last, save), 0, save, nbytes
        before = save
    if before < last:
        yield before + 1, min(last, end), 0, end, nbytes


def _sent(made: int, last: int, saves: list[int], nbytes: int) -> Iterator[Rectangle]:
    """Stages that make the value, end while it lives, and do not save its storage."""
    index = bisect_right(saves, made)
    before = saves[index - 1] if index else -1
    after = saves[index] if index < len(saves) else last
    if made >= 0 and before != made:
        yield before + 1, made, made + 1, min(last, after), nbytes


def _sum(rectangles: Iterator[Rectangle], cuts: NDArray[np.int64]) -> Array:
    """The sum of all rectangles that each pair of cuts lies in."""
    count = len(cuts)
    corners = np.zeros((count + 1, count + 1))
    table = np.array(list(rectangles), dtype=np.float64).reshape(-1, 5)
    first_a = np.searchsorted(cuts, table[:, 0])
    after_a = np.searchsorted(cuts, table[:, 1], side="right")
    first_b = np.searchsorted(cuts, table[:, 2])
    after_b = np.searchsorted(cuts, table[:, 3], side="right")
    some = (first_a < after_a) & (first_b < after_b)
    first_a, after_a, first_b, after_b = first_a[some], after_a[some], first_b[some], after_b[some]
    nbytes = table[some, 4]
    np.add.at(corners, (first_a, first_b), nbytes)
    np.add.at(corners, (after_a, first_b), -nbytes)
    np.add.at(corners, (first_a, after_b), -nbytes)
    np.add.at(corners, (after_a, after_b), nbytes)
    total: Array = corners.cumsum(axis=0).cumsum(axis=1)[:count, :count]
    return total


def _largest(sequence: UnitSequence, cuts: NDArray[np.int64]) -> Array:
    """The largest working space between each pair of cuts."""
    sizes = sequence.units.transient_bytes[sequence.order]
    between = np.maximum.reduceat(sizes, cuts[:-1]) if len(cuts) > 1 else np.zeros(0)
    rows = np.zeros((len(cuts), len(cuts)))
    for first in range(len(cuts) - 1):
        rows[first, first + 1 :] = np.maximum.accumulate(between[first:])
    return rows
