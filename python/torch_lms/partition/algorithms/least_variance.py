"""Layers in blocks whose costs have the least variance that blocks can have.

The RFC asks block partition "to minimize the variance of the submodules' cost list"; the procedure that it names
(``block_partition``) only bounds how far blocks differ, so this one has a name of its own. It is dynamic programming
over the ends of blocks. The square of a block's sum obeys the quadrangle inequality, so the best last cut moves right
with the end, and each block's cuts are found by halving: k n log n steps for n layers and k blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from torch_lms.partition.interface import Partition, PartitionProblem, evaluate
from torch_lms.partition.layers import Layers, rfc_costs

__all__ = ["LeastVariance", "least_variance_cuts"]

Array = NDArray[np.float64]


class LeastVariance:
    """Layers balanced by the RFC's cost, exactly."""

    name = "least_variance"
    source = "own: the least variance that the RFC's _partition_by_cost asks for, by dynamic programming"

    def partition(self, problem: PartitionProblem) -> Partition:
        """See the class."""
        layers = Layers.of(problem.units, problem.stages)
        costs = layers.sums(rfc_costs(problem.units, problem.cost_model))
        placed = layers.stages(least_variance_cuts(costs, problem.stages))
        reason = f"the costs of {len(layers)} layers vary as little as blocks allow"
        return evaluate(problem, placed, algorithm=self.name, reason=reason)


def least_variance_cuts(numbers: Sequence[float] | Array, blocks: int) -> list[int]:
    """Cuts of a sequence into blocks, none of them empty, whose sums have the least variance."""
    before = np.concatenate([[0.0], np.cumsum(np.asarray(numbers, dtype=np.float64))])
    if before[-1] > 0:
        before = before / before[-1]
    best = np.full(len(before), np.inf)
    best[0] = 0.0
    origins = []
    for block in range(blocks):
        best, origin = _add_block(before, best, block)
        origins.append(origin)
    cuts = [len(before) - 1]
    for origin in reversed(origins):
        cuts.append(int(origin[cuts[-1]]))
    return cuts[-2:0:-1]


def _add_block(before: Array, best: Array, block: int) -> tuple[Array, NDArray[np.int64]]:
    """The least sum of squares with one block more, for each end, and where that block begins."""
    count = len(before)
    sums = np.full(count, np.inf)
    origin = np.zeros(count, dtype=np.int64)
    ranges = [(block + 1, count - 1, block, count - 2)]
    while ranges:
        low, high, first, last = ranges.pop()
        if low > high:
            continue
        end = (low + high) // 2
        begins = slice(first, min(last, end - 1) + 1)
        squares = best[begins] + (before[end] - before[begins]) ** 2
        chosen = first + int(squares.argmin())
        sums[end], origin[end] = squares[chosen - first], chosen
        ranges += [(low, end - 1, first, chosen), (end + 1, high, chosen, last)]
    return sums, origin
