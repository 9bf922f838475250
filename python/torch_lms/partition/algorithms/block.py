"""Block partition of sequences, by time, by size and by the RFC's cost.

Source: Barany and Grinberg, "Block partitions of sequences", arXiv:1308.2452, as torchgpipe and FairScale balance
layers: every sequence of numbers has a partition into k blocks whose sums differ by no more than its largest number,
and optimal ones are found in polynomial time. Optimal means least variance here, which the RFC asks for. The square of
a block's sum obeys the quadrangle inequality, so the best last cut moves right with the end, and each stage's cuts are
found by halving: k n log n steps instead of k n^2.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from torch_lms.partition.interface import Partition, PartitionProblem, evaluate
from torch_lms.partition.layers import Layers, node_costs

__all__ = ["BalanceBySize", "BalanceByTime", "BlockPartition", "block_cuts"]

Array = NDArray[np.float64]


class BalanceByTime:
    """Layers balanced by their time."""

    name = "balance_by_time"
    source = "torchgpipe and FairScale, balance_by_time; arXiv:1308.2452"

    def partition(self, problem: PartitionProblem) -> Partition:
        """See the class."""
        return _balance(problem, problem.units.time_us, self.name, "layers' times differ as little as blocks allow")


class BalanceBySize:
    """Layers balanced by parameters with optimizer state and by activations."""

    name = "balance_by_size"
    source = "torchgpipe and FairScale, balance_by_size; arXiv:1308.2452"

    def partition(self, problem: PartitionProblem) -> Partition:
        """See the class."""
        sizes = node_costs(problem.units, problem.cost_model.parameter_cost_bytes(problem.graph))
        return _balance(problem, sizes, self.name, "layers' sizes differ as little as blocks allow")


class BlockPartition:
    """Layers balanced by the RFC's cost: weighted shares of time and memory."""

    name = "block_partition"
    source = "RFC Model Partitioning in Pipeline Parallelism, _partition_by_cost; arXiv:1308.2452"

    def partition(self, problem: PartitionProblem) -> Partition:
        """See the class."""
        model = problem.cost_model
        times = problem.units.time_us
        sizes = node_costs(problem.units, model.parameter_cost_bytes(problem.graph))
        costs = model.time_weight * _shares(times) + model.memory_weight * _shares(sizes)
        reason = f"layers' costs of {model.time_weight:g} time and {model.memory_weight:g} memory balanced"
        return _balance(problem, costs, self.name, reason)


def _shares(amounts: Array) -> Array:
    total = amounts.sum()
    return amounts / total if total > 0 else amounts


def _balance(problem: PartitionProblem, costs: Array, name: str, reason: str) -> Partition:
    layers = Layers.of(problem.units, problem.stages)
    cuts = block_cuts(layers.sums(costs), problem.stages)
    return evaluate(problem, layers.stages(cuts), algorithm=name, reason=reason)


def block_cuts(numbers: Sequence[float] | Array, blocks: int) -> list[int]:
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
