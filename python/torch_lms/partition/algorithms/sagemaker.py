"""SageMaker's partition of the module tree, devices allotted by d'Hondt.

Source: Karakus et al., "Amazon SageMaker Model Parallelism", arXiv:2111.05972, section 4. The tree is walked from its
root in breadth-first order. A module with one device keeps its whole subtree there. A module with more cuts its
children, in the order in which they run, into segments of balanced cost by dynamic programming; the devices go to the
segments by d'Hondt's method; a segment of several children with several devices is cut again, a segment that gets none
shares the device before it. What modules alone would let flow back is moved on to the stage of its inputs, since a
pipeline only goes forward.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from torch_lms.partition.bisection import lightest_cuts
from torch_lms.partition.interface import Partition, PartitionProblem, evaluate
from torch_lms.partition.layers import node_costs
from torch_lms.partition.repair import forward_only
from torch_lms.partition.units import Units

__all__ = ["ModuleTree", "dhondt"]

Array = NDArray[np.float64]


@dataclass
class _Module:
    """A module, or a single operation as a leaf."""

    cost: float = 0.0
    children: dict[str, _Module] = field(default_factory=dict)
    units: list[int] = field(default_factory=list)


class ModuleTree:
    """Modules stay whole unless they need more than one device."""

    name = "sagemaker"
    source = "Amazon SageMaker Model Parallelism, arXiv:2111.05972, section 4"

    def partition(self, problem: PartitionProblem) -> Partition:
        """See the class."""
        root = _tree(problem)
        stage_of_unit = np.zeros(len(problem.units), dtype=np.int64)
        waiting = deque([([root], list(range(problem.stages)))])
        while waiting:
            modules, devices = waiting.popleft()
            if len(modules) == 1 and modules[0].children and len(devices) > 1:
                waiting.append((list(modules[0].children.values()), devices))
            elif len(modules) == 1 or len(devices) == 1:
                for module in modules:
                    stage_of_unit[module.units] = devices[0]
            else:
                waiting += _share_out(modules, devices)
        placed = forward_only(problem.units, stage_of_unit, problem.stages)
        reason = "modules in the order they run, devices by the share of cost"
        return evaluate(problem, placed, algorithm=self.name, reason=reason)


def dhondt(costs: list[float], seats: int) -> list[int]:
    """Seats by d'Hondt: each next one goes to the highest cost divided by one more than the seats it has."""
    given = [0] * len(costs)
    for _ in range(seats):
        most = max(range(len(costs)), key=lambda index: (costs[index] / (given[index] + 1), -index))
        given[most] += 1
    return given


def _share_out(modules: list[_Module], devices: list[int]) -> list[tuple[list[_Module], list[int]]]:
    """Segments of modules with the devices that they get."""
    count = min(len(modules), len(devices))
    cuts = [0, *lightest_cuts(np.array([module.cost for module in modules]), count), len(modules)]
    segments = [modules[start:end] for start, end in itertools.pairwise(cuts)]
    seats = dhondt([sum(module.cost for module in segment) for segment in segments], len(devices))
    shared, first = [], 0
    for segment, count in zip(segments, seats, strict=True):
        mine = devices[first : first + count] or [devices[max(first - 1, 0)]]
        shared.append((segment, mine))
        first += count
    return shared


def _tree(problem: PartitionProblem) -> _Module:
    """The modules by path, children in the order of their first operation; costs are the RFC's."""
    units: Units = problem.units
    times = units.time_us
    sizes = node_costs(units, problem.cost_model.parameter_cost_bytes(problem.graph))
    total_time, total_size = max(float(times.sum()), 1e-300), max(float(sizes.sum()), 1e-300)
    root = _Module()
    for index, node in enumerate(units.nodes):
        cost = problem.cost_model.cost(float(times[index]) / total_time, float(sizes[index]) / total_size)
        module = root
        for part in [*(node.module.split(".") if node.module else []), f"\0{node.name}"]:
            module.cost += cost
            module.units.append(index)
            module = module.children.setdefault(part, _Module())
        module.cost, module.units = cost, [index]
    return root
