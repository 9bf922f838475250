"""The memory of every contiguous stage of an order, as matrices over its first and its last cut.

Note [Rectangles]: whether a stage from cut a to cut b holds something depends on a and b alone. A storage that
positions u1 < u2 < ... save is held where, for one of them, ``u(r-1) < a <= u(r)`` and ``b > u(r)``: rectangles that do
not overlap, so each storage counts once. A value made at x and last read at y is received where ``x < a <= y`` and sent
where ``a <= x < b <= y``; where a position in between saves its storage it is in the first kind already, so these
rectangles end at the next such position. All rectangles are added up by their corners and two running sums.

Note [Lasting uses]: what stays of that after a backward of inputs is held in the same way, but a use at u counts only
where the stage goes on to some later position t (Note [Meetings] in ``weight_gradients``). From a cut a on, the uses at
and after a count where ``b > t`` for one of them, so for the least of their t: again one rectangle for each use. A use
that always counts has ``t = u``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torch_lms.partition.costs import CostModel
from torch_lms.partition.offers import NO_OFFERS, Offers
from torch_lms.partition.relief import KEEP_ALL, StageNeed
from torch_lms.partition.segments import RUNS, offers_of
from torch_lms.partition.sequence import UnitSequence
from torch_lms.partition.steps import TrainingStep
from torch_lms.partition.units import MODEL_INPUT
from torch_lms.partition.weight_gradients import WeightGradients
from torch_lms.schedules.rules import splits_backward

__all__ = ["StageMatrices", "parameter_matrix", "stage_matrices"]

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Uses = Mapping[str, Mapping[int, int]]  # of each thing by position, how far a stage goes in which the use counts
Rectangle = tuple[int, int, int, int, float]  # first and last a, first and last b, inclusive; bytes


@dataclass(frozen=True, kw_only=True)
class StageMatrices:
    """For each pair of cuts, what a stage between them takes; meaningless where the second is not after the first.

    Attributes:
        static_bytes: of parameters with all that training keeps of them.
        held_bytes: for each microbatch in flight.
        transient_bytes: working space.
        kept_bytes: of gradients, for each microbatch that is half done; see Note [Half done] in ``moments``.
        freed_bytes: of ``held_bytes``, what a backward of inputs frees.
        input_transient_bytes: working space of a backward of inputs, besides all that it keeps.
        offers: what stages may give up.
    """

    static_bytes: Array
    held_bytes: Array
    transient_bytes: Array
    kept_bytes: Array
    freed_bytes: Array
    input_transient_bytes: Array
    offers: Offers = NO_OFFERS
    coarser: tuple[Offers, ...] = ()

    def need(
        self, at: Any, step: TrainingStep, stage: int, *, times_us: tuple[Any, Any], speed: float, cuts: tuple[Any, Any]
    ) -> StageNeed:
        """What a stage takes between some cuts if it keeps all.

        Args:
            at: the elements of the matrices.
            step: whose stage it is.
            stage: its number.
            times_us: of one microbatch, on its device: forward and backward together, and forward.
            speed: of its device.
            cuts: its first and its last ones.
        """
        return StageNeed(
            time_us=times_us[0],
            forward_us=times_us[1],
            static_bytes=self.static_bytes[at],
            held_bytes=self.held_bytes[at],
            transient_bytes=self.transient_bytes[at],
            kept_bytes=self.kept_bytes[at],
            freed_bytes=self.freed_bytes[at],
            input_transient_bytes=self.input_transient_bytes[at],
            in_flight=step.in_flight[stage],
            moments=step.alone[stage],
            speed=speed,
            replays=step.replays,
            half_done=step.half_done[stage],
            offers=self.offers,
            coarser=self.coarser,
            first=cuts[0],
            end=cuts[1],
        )


def stage_matrices(sequence: UnitSequence, cuts: Ints, model: CostModel) -> StageMatrices:
    """The matrices over some cuts, in ascending order with 0 and the end among them."""
    saved = _uses(sequence, [node.saved for node in sequence.units.nodes])
    held = _sum(_held(sequence, _as_they_are(saved), model.outputs_stay), cuts)
    largest, none = _largest(sequence, cuts), np.zeros_like(held)
    kept, freed, inputs = none, none, largest
    if splits_backward(model.schedule):
        gradients = WeightGradients(sequence.units, sequence.position)
        kept, inputs = _kept(sequence, cuts, gradients, largest)
        freed = _freed(sequence, cuts, gradients, held, model.outputs_stay)
    over = (cuts > 0) & (cuts < len(sequence))  # of the values at a first cut once more, both ways
    on_the_way = np.where(over, (sequence.cut_forward_bytes + sequence.cut_backward_bytes)[cuts], 0.0)[:, None]
    return StageMatrices(
        static_bytes=parameter_matrix(sequence, cuts, model.parameter_cost_bytes(sequence.units.graph)),
        held_bytes=held,
        transient_bytes=largest + on_the_way,
        kept_bytes=kept,
        freed_bytes=freed,
        input_transient_bytes=inputs + on_the_way,
        offers=NO_OFFERS if model.relief is KEEP_ALL else offers_of(sequence),
        coarser=() if model.relief is KEEP_ALL else tuple(offers_of(sequence, length) for length in RUNS),
    )


def _kept(sequence: UnitSequence, cuts: Ints, gradients: WeightGradients, transient: Array) -> tuple[Array, Array]:
    """What stages keep of a microbatch that is half done, and the working space besides that; see Note [Half done]."""
    end, units = len(sequence), sequence.units
    rectangles = ((one.after + 1, one.until, one.at + 1, end, one.nbytes) for one in gradients.meetings())
    up_to = _sum(rectangles, cuts, np.arange(end + 1))
    crossing = np.where(cuts < end, sequence.cut_backward_bytes[cuts], 0.0)
    kept = up_to[:, cuts] + crossing[:, None] + crossing[None, :]
    if not np.array_equal(sequence.order, np.arange(end)):
        return kept, transient  # stages run in the graph's order: with another one it is no more than this
    output_gradients = np.array([node.gradient_bytes for node in units.nodes], dtype=np.float64)
    space = units.transient_bytes - np.minimum(np.diff(up_to, axis=1), output_gradients) - up_to[:, :-1]
    space[np.arange(end)[None, :] < cuts[:, None]] = 0.0
    return kept, np.maximum(np.maximum.accumulate(space, axis=1), 0.0)[:, cuts - 1]


def _freed(sequence: UnitSequence, cuts: Ints, gradients: WeightGradients, held: Array, outputs_stay: bool) -> Array:
    """What a backward of inputs frees."""
    end, stays_after = len(sequence), gradients.stays_after()
    lasting: dict[str, dict[int, int]] = {}
    for node in sequence.units.graph.nodes:
        for id_ in node.saved if node.name in stays_after else ():
            at = int(sequence.position[sequence.units.number_of(node.name)])
            uses = lasting.setdefault(id_, {})
            uses[at] = min(uses.get(at, end), stays_after[node.name])
    freed = np.maximum(
        held - _sum(_held(sequence, lasting, outputs_stay), cuts), 0.0
    )  # a value may be larger than its storage
    freed[cuts == 0] = 0.0
    return freed


def parameter_matrix(sequence: UnitSequence, cuts: Ints, sizes: Mapping[str, float]) -> Array:
    """For each pair of cuts, the sizes of the parameters that a stage between them reads; 0 where none is given."""
    uses = {name: at for name, at in _uses(sequence, sequence.units.parameters).items() if name in sizes}
    return _sum(_once(_as_they_are(uses), sizes, len(sequence)), cuts)


def _uses(sequence: UnitSequence, names: Sequence[tuple[str, ...]]) -> dict[str, list[int]]:
    """The positions that name each thing, ascending."""
    uses: dict[str, list[int]] = {}
    for position, unit in enumerate(sequence.order):
        for name in dict.fromkeys(names[unit]):
            uses.setdefault(name, []).append(position)
    return uses


def _as_they_are(uses: Mapping[str, Iterable[int]]) -> Uses:
    """Uses that always count."""
    return {name: {position: position for position in positions} for name, positions in uses.items()}


def _ranges(uses: Mapping[int, int]) -> list[tuple[int, int, int]]:
    """First and last a of the stages in which a use comes next, and how far one goes for some use to count."""
    found: list[tuple[int, int, int]] = []
    positions = sorted(uses, reverse=True)
    for position, before in zip(positions, [*positions[1:], -1], strict=False):
        least = min(uses[position], found[-1][2]) if found else uses[position]
        found.append((before + 1, position, least))
    return found


def _once(uses: Uses, sizes: Mapping[str, float], end: int) -> Iterator[Rectangle]:
    """Where a stage has at least one use of a thing."""
    for name, positions in uses.items():
        for first, last, reached in _ranges(positions):
            yield first, last, reached + 1, end, sizes[name]


def _held(sequence: UnitSequence, saved: Uses, outputs_stay: bool) -> Iterator[Rectangle]:
    end = len(sequence)
    far = end if outputs_stay else end - 1  # the last cut to which something is held for what comes after it
    yield from _once(saved, sequence.units.graph.storage_bytes, end)
    for value, (made, last) in zip(sequence.units.values, sequence.spans, strict=True):
        uses: dict[int, int] = {}
        for id_ in value.storages:
            for use, reached in saved.get(id_, {}).items():
                uses[use] = min(uses.get(use, reached), reached)
        if made == MODEL_INPUT:
            readers = {int(sequence.position[user]) if user < end else end - 1 for user in value.consumers}
            yield from _fed(readers, uses, end, value.forward_bytes)
            continue
        for first, last_a, reached in [*_ranges(uses), (max(uses, default=-1) + 1, end, end)]:
            # received, and sent; neither where a use counts
            yield max(first, made + 1), min(last_a, last), 0, reached, value.forward_bytes
            yield first, min(last_a, made), made + 1, min(last, reached, far), value.forward_bytes


def _fed(readers: set[int], saves: Mapping[int, int], end: int, nbytes: int) -> Iterator[Rectangle]:
    """Stages that read an input of the model and do not save it: those that do either, less those that save."""
    either = {**saves, **{reader: reader for reader in readers}}
    yield from _once({"": either}, {"": nbytes}, end)
    yield from _once({"": saves}, {"": -nbytes}, end)


def _sum(rectangles: Iterator[Rectangle], cuts: Ints, last_cuts: Ints | None = None) -> Array:
    """The sum of all rectangles that each pair of cuts lies in; the second of the same cuts, or of others."""
    last_cuts = cuts if last_cuts is None else last_cuts
    corners = np.zeros((len(cuts) + 1, len(last_cuts) + 1))
    table = np.array(list(rectangles), dtype=np.float64).reshape(-1, 5)
    first_a = np.searchsorted(cuts, table[:, 0])
    after_a = np.searchsorted(cuts, table[:, 1], side="right")
    first_b = np.searchsorted(last_cuts, table[:, 2])
    after_b = np.searchsorted(last_cuts, table[:, 3], side="right")
    some = (first_a < after_a) & (first_b < after_b)
    first_a, after_a, first_b, after_b = first_a[some], after_a[some], first_b[some], after_b[some]
    nbytes = table[some, 4]
    np.add.at(corners, (first_a, first_b), nbytes)
    np.add.at(corners, (after_a, first_b), -nbytes)
    np.add.at(corners, (first_a, after_b), -nbytes)
    np.add.at(corners, (after_a, after_b), nbytes)
    total: Array = corners.cumsum(axis=0).cumsum(axis=1)[:-1, :-1]
    return total


def _largest(sequence: UnitSequence, cuts: Ints) -> Array:
    """The largest working space between each pair of cuts."""
    sizes = sequence.units.transient_bytes[sequence.order]
    between = np.maximum.reduceat(sizes, cuts[:-1]) if len(cuts) > 1 else np.zeros(0)
    rows = np.zeros((len(cuts), len(cuts)))
    for first in range(len(cuts) - 1):
        rows[first, first + 1 :] = np.maximum.accumulate(between[first:])
    return rows
