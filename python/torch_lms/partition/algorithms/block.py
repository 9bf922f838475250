"""Block partition of sequences as torchgpipe and FairScale balance layers: by time, by size and by the RFC's cost.

Source: Barany and Grinberg, "Block partitions of sequences", arXiv:1308.2452 (Israel Journal of Mathematics, 2015),
steps (1) to (3) of the proof of its theorem: numbers from 0 to 1 have a partition into k blocks whose sums differ by at
most 1. ``torchgpipe.balance.blockpartition.solve`` follows these steps on costs that it maps onto 0 to 1, the smallest
one to 0 and the largest one to 1, from blocks of equal length, of which the last takes the remainder.

The bound holds for what is left of the costs without their smallest one, so blocks of different lengths may differ by
more; `LeastVariance` is exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from torch_lms.errors import PartitionError
from torch_lms.partition.interface import Partition, PartitionProblem, evaluate
from torch_lms.partition.layers import Layers, node_costs, rfc_costs

__all__ = ["BalanceBySize", "BalanceByTime", "BlockPartition", "solve"]

Array = NDArray[np.float64]


class BalanceByTime:
    """Layers balanced by their time, forward and backward."""

    name = "balance_by_time"
    source = "torchgpipe and FairScale, balance_by_time; block partition of arXiv:1308.2452"

    def partition(self, problem: PartitionProblem) -> Partition:
        """See the class."""
        return _balance(problem, problem.units.time_us, self.name, "times")


class BalanceBySize:
    """Layers balanced by their activations and their parameters, these times what the optimizer keeps of them.

    The optimizer's multiplier is torchgpipe's ``param_scale``.
    """

    name = "balance_by_size"
    source = "torchgpipe and FairScale, balance_by_size; block partition of arXiv:1308.2452"

    def partition(self, problem: PartitionProblem) -> Partition:
        """See the class."""
        sizes = node_costs(problem.units, problem.cost_model.parameter_cost_bytes(problem.graph))
        return _balance(problem, sizes, self.name, "sizes")


class BlockPartition:
    """Layers balanced by the RFC's cost: weighted shares of time and memory."""

    name = "block_partition"
    source = "RFC Model Partitioning in Pipeline Parallelism, _partition_by_cost; block partition of arXiv:1308.2452"

    def partition(self, problem: PartitionProblem) -> Partition:
        """See the class."""
        model = problem.cost_model
        what = f"costs of {model.time_weight:g} time and {model.memory_weight:g} memory"
        return _balance(problem, rfc_costs(problem.units, model), self.name, what)


def solve(sequence: Sequence[float], partitions: int) -> list[list[float]]:
    """Cuts a sequence into blocks until the largest one is within the range of the numbers of the smallest one.

    The range is the largest number less the smallest one, and a block's size is the sum of its numbers, each less the
    smallest one. Of several smallest blocks the one closest to the largest block grows, as the paper says; torchgpipe
    takes the first of them, which may take from an empty block. No block ends up empty: one that gives its only number
    is then the closest smallest one, so it grows next, and so on until the largest block has given.

    Note [Exact sums]: all sums are of integers, so that rounding cannot send a number back and forth for ever.

    Raises:
        PartitionError: if there is no partition to make, or there are fewer numbers than partitions.
    """
    if partitions < 1:
        raise PartitionError(f"expected at least 1 partition, found {partitions}; ask for 1 or more")
    if len(sequence) < partitions:
        raise PartitionError(
            f"expected at least as many numbers as partitions, found {len(sequence)} for {partitions}; ask for fewer"
        )
    sizes = _as_integers(sequence)
    each = len(sequence) // partitions
    marks = [*range(0, each * partitions, each), len(sequence)]
    blocks = [sum(sizes[start:end]) for start, end in itertools.pairwise(marks)]
    largest = _find_largest(blocks)
    while blocks[largest] > min(blocks) + max(sizes):
        smallest = _find_smallest(blocks, near=largest)
        giver = smallest - 1 if largest < smallest else smallest + 1
        _move_one(sizes, blocks, marks, giver, smallest)
        if giver == largest:
            largest = _find_largest(blocks)
    return [list(sequence[start:end]) for start, end in itertools.pairwise(marks)]


def _as_integers(sequence: Sequence[float]) -> list[int]:
    """The numbers less the smallest one, all times the same power of two; see Note [Exact sums]."""
    exact = [Fraction(float(number)) for number in sequence]
    scale = max(number.denominator for number in exact)
    smallest = min(exact)
    return [int((number - smallest) * scale) for number in exact]


def _find_largest(blocks: list[int]) -> int:
    """Step (1); the last of several, as in torchgpipe."""
    return max(range(len(blocks)), key=lambda index: (blocks[index], index))


def _find_smallest(blocks: list[int], near: int) -> int:
    """Step (3): of several, the closest one."""
    return min(range(len(blocks)), key=lambda index: (blocks[index], abs(index - near), index))


def _move_one(sizes: list[int], blocks: list[int], marks: list[int], giver: int, taker: int) -> None:
    """Gives the taker the number next to it."""
    if giver < taker:
        marks[taker] -= 1
        moved = sizes[marks[taker]]
    else:
        moved = sizes[marks[giver]]
        marks[giver] += 1
    blocks[giver] -= moved
    blocks[taker] += moved


def _balance(problem: PartitionProblem, costs: Array, name: str, what: str) -> Partition:
    layers = Layers.of(problem.units, problem.stages)
    blocks = solve([float(cost) for cost in layers.sums(costs)], problem.stages)
    ends = itertools.accumulate(len(block) for block in blocks[:-1])
    placed = layers.stages(list(ends))
    reason = f"the {what} of {len(layers)} layers in blocks, from equal numbers of layers on"
    return evaluate(problem, placed, algorithm=name, reason=reason)
