"""The cuts of a sequence whose heaviest part is lightest, found by bisection of that part's weight."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["lightest_cuts"]


def lightest_cuts(weights: NDArray[np.float64], stages: int) -> list[int]:
    """Cuts whose heaviest stage is lightest, each stage with at least one layer."""
    before = np.concatenate([[0.0], np.cumsum(weights)])
    low, high = max(float(weights.max()), float(before[-1]) / stages), float(before[-1])
    cuts = _fill(before, high, stages)
    while high - low > 1e-9 * max(high, 1e-300):
        middle = (low + high) / 2
        tried = _fill(before, middle, stages)
        if tried is None:
            low = middle
        else:
            cuts, high = tried, middle
    tried = _fill(before, low, stages)
    chosen = tried if tried is not None else cuts
    assert chosen is not None  # one stage of everything is within the first bound
    return chosen


def _fill(before: NDArray[np.float64], bound: float, stages: int) -> list[int] | None:
    """Takes layers greedily under a bound, but leaves one for each stage to come; None if some are left over."""
    layers = len(before) - 1
    cuts: list[int] = []
    start = 0
    for stage in range(1, stages):
        end = int(np.searchsorted(before, before[start] + bound * (1 + 1e-12), side="right")) - 1
        start = min(max(end, start + 1), layers - (stages - stage))
        cuts.append(start)
    return cuts if before[-1] - before[start] <= bound * (1 + 1e-12) else None
