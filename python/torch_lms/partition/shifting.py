"""Shifts the borders of contiguous stages one by one, by what whole steps take: `shift_borders`.

Note [Expected orders]: where a device has one transfer at a time, a step's transfers have the order in which values are
expected (`TrainingStep.expecting`). A search over many cuts has to take one order for all: that of stages which take
equally long. So what it finds may be improved a little by looking at its neighbours, each in its own order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from torch_lms.partition.costs import DeviceSpec
from torch_lms.partition.figures import measure
from torch_lms.partition.interface import PartitionProblem
from torch_lms.partition.sequence import UnitSequence

__all__ = ["shift_borders"]

Ints = NDArray[np.int64]

_SHIFTS = (1, 2, 4, 8, 16, 32)  # units, both ways
_MOST_STEPS = 400  # that are looked at
_LEAST_GAIN = 1e-6


def shift_borders(problem: PartitionProblem, stage_of_unit: Ints, devices: Sequence[DeviceSpec]) -> tuple[Ints, int]:
    """Shifts single borders of stages as long as a step gets shorter and everything still fits.

    Args:
        problem: what is cut.
        stage_of_unit: contiguous in the graph's order; others stay as they are.
        devices: in stage order.

    Returns:
        Where each unit is, and how many borders were shifted.
    """
    if (np.diff(stage_of_unit) < 0).any():
        return stage_of_unit, 0
    sequence, links = UnitSequence(problem.units), problem.links_between(devices)

    def over(cuts: Sequence[int]) -> tuple[float, float]:
        figures = measure(problem.units, sequence.stages(cuts), devices, links, problem.cost_model)
        return figures.excess_bytes, figures.step.step_us

    cuts = [int(cut) for cut in np.searchsorted(stage_of_unit, np.arange(1, problem.stages))]
    best, shifted, left = over(cuts), 0, _MOST_STEPS
    moved = True
    while moved:
        moved = False
        for near in _near(cuts, len(sequence)):
            if left == 0:
                return sequence.stages(cuts), shifted
            left -= 1
            now = over(near)
            if now[0] <= best[0] and now[1] < best[1] * (1 - _LEAST_GAIN):
                cuts, best, moved = near, now, True
                shifted += 1
                break
    return sequence.stages(cuts), shifted


def _near(cuts: Sequence[int], end: int) -> Iterator[list[int]]:
    """These cuts with one of them elsewhere, and no stage without units."""
    bounds = [0, *cuts, end]
    for border, cut in enumerate(cuts):
        for shift in _SHIFTS:
            for there in (cut - shift, cut + shift):
                if bounds[border] < there < bounds[border + 2]:
                    yield [*cuts[:border], there, *cuts[border + 1 :]]
