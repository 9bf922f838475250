"""Makes a pipeline of stages that a tree or a merge has made: forward only, and work for each."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from torch_lms.partition.units import Units

__all__ = ["forward_only"]

Ints = NDArray[np.int64]


def forward_only(units: Units, stage_of_unit: Ints, stages: int) -> Ints:
    """Moves units on to the stage of their latest input, then gives each stage without work some of its neighbour's.

    The result is valid: no value goes back, and each stage has at least one unit (there must be as many).
    """
    placed = stage_of_unit.copy()
    for unit, inputs in enumerate(units.inputs):
        for source in inputs:
            placed[unit] = max(placed[unit], placed[source])
    if len(np.unique(placed)) == stages:
        return placed
    return _fill_idle(placed, units.time_us, stages)


def _fill_idle(placed: Ints, time_us: NDArray[np.float64], stages: int) -> Ints:
    """Sorts units by stage, where each stage's own order stays, and halves the busiest stage for each idle one.

    A stage's first half in topological order never reads from its second, so a cut inside a stage is a valid border.
    """
    groups = [np.flatnonzero(placed == stage) for stage in range(stages)]
    groups = [group for group in groups if len(group)]
    while len(groups) < stages:
        index = max(
            (i for i in range(len(groups)) if len(groups[i]) > 1), key=lambda i: float(time_us[groups[i]].sum())
        )
        group = groups[index]
        before = np.cumsum(time_us[group])
        half = 1 + int(np.maximum(before[:-1], before[-1] - before[:-1]).argmin())
        groups[index : index + 1] = [group[:half], group[half:]]
    result = np.empty_like(placed)
    for stage, group in enumerate(groups):
        result[group] = stage
    return result
