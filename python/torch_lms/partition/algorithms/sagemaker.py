"""SageMaker's partition of the module tree: dynamic programming over siblings, devices allotted by d'Hondt.

Source: Karakus et al., "Amazon SageMaker Model Parallelism: A General and Flexible Framework for Large Model Training",
arXiv:2111.05972, the partitioning of PyTorch models: its algorithms 1 (the walk over the tree), 2 (the partition of one
module's children) and 3 (d'Hondt), its problem (2) and recursion (3). The names below are the paper's:

- A node n is a module. Its cost C(n) weighs memory and computation, relative to the root's; the weights are the RFC's.
- P(n) are the devices of n's subtree, all of them for the root. The tree is walked in breadth-first order, and n's own
  operations run on d(n), the first device of P(n). A single device is handed down to all children Q(n).
- Several devices cut Q(n), in the order in which it runs, into as many segments whose largest cost is least, or into
  single children if these are fewer. D'Hondt's method gives the segments devices by their cost. A segment that gets
  none runs on d(n), a child alone or a device alone ends there, and a longer segment with several devices is cut again.

What modules alone would let flow back is then moved on to the stage of its inputs, since a pipeline only goes forward,
and a device that the tree has no use for (a module without children got several) takes half of the busiest stage. The
paper keeps modules with the same parameters together; here each stage that uses a parameter has it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from torch_lms.partition.interface import Partition, PartitionProblem, evaluate
from torch_lms.partition.layers import rfc_costs
from torch_lms.partition.repair import forward_only

__all__ = ["ModuleNode", "ModuleTree", "allot_devices", "cut_segments", "dhondt", "find_devices"]

Array = NDArray[np.float64]


@dataclass
class ModuleNode:
    """A module: n in the paper.

    Attributes:
        cost: C(n), with all children.
        children: Q(n) by name, in the order in which they first run.
        units: its own operations, without its children's.
    """

    cost: float = 0.0
    children: dict[str, ModuleNode] = field(default_factory=dict)
    units: list[int] = field(default_factory=list)


class ModuleTree:
    """Modules stay whole unless they get more than one device."""

    name = "sagemaker"
    source = "Amazon SageMaker Model Parallelism, arXiv:2111.05972, algorithms 1 to 3"

    def partition(self, problem: PartitionProblem) -> Partition:
        """See the class."""
        stage_of_unit = np.zeros(len(problem.units), dtype=np.int64)
        for module, device in find_devices(_make_tree(problem), problem.stages):
            stage_of_unit[module.units] = device
        placed = forward_only(problem.units, stage_of_unit, problem.stages)
        reason = "modules in the order they run, devices by the share of cost"
        return evaluate(problem, placed, algorithm=self.name, reason=reason)


def find_devices(root: ModuleNode, devices: int) -> list[tuple[ModuleNode, int]]:
    """Algorithm 1: each module in breadth-first order, and d(n), the device of its own operations."""
    found = []
    waiting = deque([(root, list(range(devices)))])
    while waiting:
        module, mine = waiting.popleft()
        found.append((module, mine[0]))
        children = list(module.children.values())
        shares = allot_devices([child.cost for child in children], mine)
        waiting.extend(zip(children, shares, strict=True))
    return found


def allot_devices(costs: Sequence[float], devices: list[int]) -> list[list[int]]:
    """Algorithm 2: the devices of each of some siblings, from the devices of all."""
    if len(devices) == 1:
        return [devices for _ in costs]
    marks = [0, *cut_segments(costs, min(len(devices), len(costs))), len(costs)] if costs else [0]
    segments = [costs[start:end] for start, end in itertools.pairwise(marks)]
    ends = list(itertools.accumulate(dhondt([sum(segment) for segment in segments], len(devices))))
    shares: list[list[int]] = []
    for segment, start, end in zip(segments, [0, *ends], ends, strict=False):
        mine = devices[start:end]
        if len(segment) > 1 and len(mine) > 1:
            shares += allot_devices(segment, mine)
        else:
            shares += [mine or devices[:1] for _ in segment]
    return shares


def cut_segments(costs: Sequence[float], segments: int) -> list[int]:
    """Where segments with the least largest cost begin, but the first one.

    Problem (2) by recursion (3): the least largest cost of k segments that end at i is, over all j before i, the least
    ``max(c(k - 1, j), C(j + 1) + ... + C(i))``. In j the first does not fall and the second does not rise, so the
    least is where they meet, which bisection finds for all i at once: n log n steps for each k instead of n squared.
    """
    before = np.concatenate([[0.0], np.cumsum(np.asarray(costs, dtype=np.float64))])
    ends = np.arange(len(before))
    least = before
    origins: list[NDArray[np.int64]] = []
    for _ in range(1, segments):
        first = len(origins) + 1
        meets = np.searchsorted(least[first:] + before[first:], before, side="left") + first
        above = np.clip(meets, first, np.maximum(ends - 1, first))
        below = np.clip(meets - 1, first, np.maximum(ends - 1, first))
        high = np.maximum(least[above], before - before[above])
        low = np.maximum(least[below], before - before[below])
        origins.append(np.where(low <= high, below, above))
        least = np.minimum(low, high)
    cuts = [len(costs)]
    for origin in reversed(origins):
        cuts.append(int(origin[cuts[-1]]))
    return cuts[:0:-1]


def dhondt(costs: Sequence[float], seats: int) -> list[int]:
    """Algorithm 3: seats by d'Hondt; each next one goes to the highest cost over one more than the seats it has."""
    given = [0] * len(costs)
    for _ in range(seats if costs else 0):
        most = max(range(len(costs)), key=lambda index: (costs[index] / (given[index] + 1), -index))
        given[most] += 1
    return given


def _make_tree(problem: PartitionProblem) -> ModuleNode:
    """The modules by path, children in the order of their first operation."""
    costs = rfc_costs(problem.units, problem.cost_model)
    root = ModuleNode()
    for index, node in enumerate(problem.units.nodes):
        module = root
        module.cost += float(costs[index])
        for part in node.module.split(".") if node.module else []:
            module = module.children.setdefault(part, ModuleNode())
            module.cost += float(costs[index])
        module.units.append(index)
    return root
