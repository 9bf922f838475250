"""The RFC's bottom-up merging: each node is a part, and parts are merged while that lowers the cost.

Source: RFC Model Partitioning in Pipeline Parallelism, "Approach that enables more possibility of balanced
partitioning". The scan follows a breadth-first order, and only neighbours in it are merged, so that no merge ever
makes a cycle. The cost of a set of parts is the sum of the squares of their own costs, which is least when they are
even, and the transfers between them. The merge that raises the first least for each transfer that it saves comes
first, until there are as many parts as stages.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from torch_lms.partition.interface import Partition, PartitionProblem, evaluate
from torch_lms.partition.layers import node_costs
from torch_lms.partition.sequence import UnitSequence

__all__ = ["BottomUpMerging", "merge"]

Array = NDArray[np.float64]


class BottomUpMerging:
    """Merges neighbours of a breadth-first order until one part is left for each stage."""

    name = "merging"
    source = "RFC Model Partitioning in Pipeline Parallelism, bottom-up merging"

    def partition(self, problem: PartitionProblem) -> Partition:
        """See the class."""
        units, model = problem.units, problem.cost_model
        sequence = UnitSequence(units, problem.orders.get("breadth-first", problem.orders["given"]))
        sizes = node_costs(units, model.parameter_cost_bytes(problem.graph))
        costs = model.time_weight * _shares(units.time_us) + model.memory_weight * _shares(sizes)
        crossing = sequence.cut_forward_bytes + sequence.cut_backward_bytes
        cuts = merge(costs[sequence.order], crossing, problem.stages)
        reason = f"{len(units)} nodes merged into {problem.stages} parts in breadth-first order"
        return evaluate(problem, sequence.stages(cuts), algorithm=self.name, reason=reason)


def merge(costs: Array, crossing_bytes: Array, parts: int) -> list[int]:
    """Cuts that are left when neighbours were merged down to some number of parts.

    Args:
        costs: of each position.
        crossing_bytes: over the cut before each position, and over the end.
        parts: to be left.
    """
    count = len(costs)
    after = list(range(1, count + 1))
    before = list(range(-1, count - 1))
    cost = [float(one) for one in costs]
    saves = crossing_bytes / max(float(crossing_bytes.max()), 1e-300)
    version = [0] * count

    def merged(part: int) -> tuple[float, int, int, int]:
        other = after[part]
        rise = 2 * cost[part] * cost[other] / (1 + float(saves[other]))
        return rise, part, version[part], version[other]

    heap = [merged(part) for part in range(count - 1)]
    heapq.heapify(heap)
    left = count
    while left > parts:
        _, part, mine, others = heapq.heappop(heap)
        other = after[part]
        if version[part] != mine or other >= count or version[other] != others:
            continue
        cost[part] += cost[other]
        after[part] = after[other]
        version[other] = -1
        version[part] += 1
        left -= 1
        if after[part] < count:
            before[after[part]] = part
            heapq.heappush(heap, merged(part))
        if before[part] >= 0:
            heapq.heappush(heap, merged(before[part]))
    return [start for start in range(1, count) if version[start] >= 0]


def _shares(amounts: Array) -> Array:
    total = amounts.sum()
    return amounts / total if total > 0 else amounts
