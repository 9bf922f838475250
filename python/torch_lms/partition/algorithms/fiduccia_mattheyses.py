"""Fiduccia-Mattheyses refinement on the operator graph.

Source: Fiduccia and Mattheyses, "A linear-time heuristic for improving network partitions", DAC 1982. In a pass each
cell moves at most once: the base cell is chosen among the free ones of highest gain, which bucket arrays keep at hand;
it moves, even if that makes things worse, and is locked; the gains of its neighbours are updated where a net is
critical; at the end everything after the best moment is undone. Passes go on until one gains nothing. All updates of a
pass are linear in the number of pins (``placement``, ``gain_buckets``).

What is different, for a pipeline of several devices:

- There are more than two parts, in a row, and a cell moves to the next or to the one before, if no value then goes
  back. There is one bucket array for each border and direction.
- The gain is the bytes that a move saves over its border. Their balance criterion, which chooses between the arrays, is
  the predicted step here, and a stage is never left empty: of a few cells from the top of each array, the one with the
  shortest step after its move is the base cell.
- A pass ends early where many moves in a row brought nothing, and the best moment must be no worse by the full figures,
  with memory and relief.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from torch_lms.partition.bisection import lightest_cuts
from torch_lms.partition.costs import DeviceSpec
from torch_lms.partition.figures import measure
from torch_lms.partition.gain_buckets import GainBuckets
from torch_lms.partition.interface import Partition, PartitionProblem, evaluate
from torch_lms.partition.placement import Move, Placement
from torch_lms.partition.sequence import UnitSequence

__all__ = ["FiducciaMattheyses", "Pass", "refine"]

Ints = NDArray[np.int64]
_MOST_MOVES = 3000
_PATIENCE = 48
_MOST_CHECKS = 6
_LOOKED_AT = 8


class FiducciaMattheyses:
    """Cuts the graph's order into even times, then moves nodes over the borders."""

    name = "fm"
    source = "Fiduccia and Mattheyses, DAC 1982; several stages, forward only"

    def partition(self, problem: PartitionProblem) -> Partition:
        """See the class."""
        sequence = UnitSequence(problem.units)
        start = sequence.stages(lightest_cuts(problem.units.time_us, problem.stages))
        placed, moves = refine(problem, start, problem.devices)
        reason = f"even times, then {moves} moves over borders"
        return evaluate(problem, placed, algorithm=self.name, reason=reason)


def refine(problem: PartitionProblem, stage_of_unit: Ints, devices: Sequence[DeviceSpec]) -> tuple[Ints, int]:
    """Moves units over borders as long as a step gets shorter and everything still fits.

    Returns:
        Where each unit is, and how many moves were made.
    """
    placement = Placement(problem, stage_of_unit, devices)
    links = problem.links_between(devices)

    def over(placed: Ints) -> tuple[float, float]:
        figures = measure(problem.units, placed, devices, links, problem.cost_model)
        return figures.excess_bytes, figures.step.step_us

    best, kept = over(placement.placed_array()), 0
    left = _MOST_MOVES
    while left > 0:
        one_pass = Pass(placement)
        moves, marks = one_pass.run(most=left, patience=_PATIENCE)
        left -= max(len(moves), 1)
        keep = 0
        for mark in marks[: -_MOST_CHECKS - 1 : -1]:
            placement.undo(moves[mark:])
            del moves[mark:]
            now = over(placement.placed_array())
            if now < best:
                best, keep = now, mark
                break
        placement.undo(moves[keep:])
        kept += keep
        if keep == 0:
            break
    return placement.placed_array(), kept


class Pass:
    """One pass over a placement: a bucket array for each direction over each border, and the locked units."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        borders = itertools.pairwise(range(placement.stages))
        self._buckets = {way: GainBuckets() for pair in borders for way in (pair, pair[::-1])}
        self._locked: set[int] = set()
        for unit in range(len(placement.stage)):
            self._refresh(unit)

    @property
    def operations(self) -> int:
        """Of all bucket arrays; `Placement.pins` counts the rest."""
        return sum(buckets.operations for buckets in self._buckets.values())

    def run(self, most: int, patience: int) -> tuple[list[Move], list[int]]:
        """All moves made, at most so many, and after how many of them the placement was better than ever.

        Args:
            most: moves in all.
            patience: moves in a row that are no better than the best moment.
        """
        moves: list[Move] = []
        marks: list[int] = []
        best = self._placement.progress()
        while len(moves) < most and len(moves) - (marks[-1] if marks else 0) < patience:
            candidates = self._candidates()
            if not candidates:
                break
            now, move = min((self._placement.progress(move), move) for move in candidates)
            self._lock(move.unit)
            for unit in self._placement.make(move) - self._locked:
                self._refresh(unit)
            moves.append(move)
            if now.step_us < best.step_us * (1 - 1e-9) or (
                now.step_us <= best.step_us * (1 + 1e-12) and now.squares < best.squares * (1 - 1e-9)
            ):
                best = now
                marks.append(len(moves))
        return moves, marks

    def _candidates(self) -> list[Move]:
        """Some moves of high gain over each border in each direction."""
        return [
            Move(unit, *way)
            for way, buckets in self._buckets.items()
            if self._placement.count[way[0]] > 1
            for unit in buckets.highest(_LOOKED_AT)
        ]

    def _lock(self, unit: int) -> None:
        self._locked.add(unit)
        for buckets in self._ways_from(unit).values():
            buckets.drop(unit)

    def _refresh(self, unit: int) -> None:
        """Puts a free unit where its gains belong; where it cannot move to, it is in no bucket."""
        targets = self._placement.targets(unit)
        for target, buckets in self._ways_from(unit).items():
            if target in targets:
                buckets.put(unit, self._placement.gain(unit, target))
            else:
                buckets.drop(unit)

    def _ways_from(self, unit: int) -> dict[int, GainBuckets]:
        """The bucket arrays of a unit's stage, by where its moves go."""
        stage = self._placement.stage[unit]
        ways = ((target, self._buckets.get((stage, target))) for target in (stage - 1, stage + 1))
        return {target: buckets for target, buckets in ways if buckets is not None}
