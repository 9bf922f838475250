"""Dynamic programming over the operator graph, with communication and memory caps, exact as far as it says so.

Source: PipeDream (Harlap et al., arXiv:1806.03377; Narayanan et al., SOSP 2019), section 3.1: the optimal pipeline
up to some layer is the best of all shorter optimal pipelines with one more stage, where a stage costs its time or its
transfers, whichever is longer. Here training is synchronous and what counts is the step as the schedule makes it (Note
[Step time] in ``costs``), which dynamic programming bounds and a search decides (Note [Bounded search] in
``cut_search``); caps and links count, and several topological orders are tried.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch_lms.errors import PartitionError
from torch_lms.partition.contiguous import ContiguousStages, Found
from torch_lms.partition.costs import DeviceSpec
from torch_lms.partition.interface import Partition, PartitionProblem, evaluate, gib
from torch_lms.partition.sequence import UnitSequence
from torch_lms.partition.steps import device_of_stage

__all__ = ["DynamicProgramming", "LeastCaps", "least_caps"]

_MOST_DEVICE_ORDERS = 120
_CELLS = 2e7
_QUICK_CELLS = 1e5
_ROUGH_CELLS = 5e5
_MOST_SOLVED = 2
_ROUNDING = 1e-12  # of a product of floats, which must not make a cap a byte larger

Devices = tuple[DeviceSpec, ...]


class DynamicProgramming:
    """The shortest step over contiguous stages of several topological orders."""

    name = "dp"
    source = "PipeDream, arXiv:1806.03377, section 3.1; synchronous"

    def partition(self, problem: PartitionProblem) -> Partition:
        """See the class.

        Raises:
            PartitionError: if no contiguous stages fit, with the least cap that works.
        """
        best: tuple[Partition, str, Found] | None = None
        solved = 0
        ways, enough = _most_promising_first(problem)
        for name, sequence, devices in ways:
            found = _stages(problem, sequence, devices).solve()
            if found is None:
                continue
            made = evaluate(problem, sequence.stages(found.cuts), algorithm=self.name, reason="", devices=devices)
            if best is None or (made.step_us, made.bottleneck_us) < (best[0].step_us, best[0].bottleneck_us):
                best = made, name, found
            solved += 1
            if solved == enough:
                break
        if best is None:
            raise PartitionError(_nothing_fits(problem))
        made, name, found = best
        return Partition(**{**made.__dict__, "reason": _reason(name, found)})


def _reason(order: str, found: Found) -> str:
    if found.optimal:
        return f"the shortest step of all contiguous stages of the {order} order"
    scope = "the cuts looked at" if not found.every_cut else f"contiguous stages of the {order} order"
    return f"within {100 * found.gap_us / found.step_us:.2f} % of the shortest step of {scope} ({order} order)"


def _stages(
    problem: PartitionProblem, sequence: UnitSequence, devices: Devices, cells: float = 2e7
) -> ContiguousStages:
    links = problem.links_between(devices)
    return ContiguousStages(sequence, devices, links, problem.cost_model, cells)


def _device_orders(problem: PartitionProblem) -> list[Devices]:
    """The given order, and where the problem allows it the others that differ in more than names."""
    if not problem.reorder_devices:
        return [problem.devices]
    orders: dict[tuple[object, ...], Devices] = {}
    for devices in itertools.islice(_permutations(problem), 50 * _MOST_DEVICE_ORDERS):
        links = tuple(problem.links_between(devices))
        key = (tuple((device.speed, device.memory_cap_bytes) for device in devices), links)
        orders.setdefault((*key, device_of_stage([device.name for device in devices])), devices)
        if len(orders) == _MOST_DEVICE_ORDERS:
            break
    return list(orders.values())


def _permutations(problem: PartitionProblem) -> Iterator[Devices]:
    """Devices in turn stay so, in another order."""
    each = tuple({device.name: device for device in problem.devices}.values())
    turns = problem.stages // len(each)
    if problem.devices == each * turns:
        return (devices * turns for devices in itertools.permutations(each))
    return itertools.permutations(problem.devices)


def _most_promising_first(problem: PartitionProblem) -> tuple[list[tuple[str, UnitSequence, Devices]], int]:
    """Every order of nodes with every order of devices, and how many of them to solve exactly.

    If that is much work, a rough look says which come first.
    """
    ways = [
        (name, UnitSequence(problem.units, order), devices)
        for name, order in problem.orders.items()
        for devices in _device_orders(problem)
    ]
    cuts = min(len(problem.units), int((_CELLS / problem.stages) ** 0.5))
    if len(ways) == 1 or len(ways) * problem.stages * cuts**2 <= _QUICK_CELLS:
        return ways, len(ways)
    steps = [_stages(problem, sequence, devices, _ROUGH_CELLS).estimate() for _, sequence, devices in ways]
    return [ways[index] for index in sorted(range(len(ways)), key=lambda index: (steps[index], index))], _MOST_SOLVED


@dataclass(frozen=True, kw_only=True)
class LeastCaps:
    """The smallest known caps, all in the given proportion, under which contiguous stages fit.

    Attributes:
        factor: on the given caps; at most 1 if these are enough.
        caps: one for each stage, in bytes; None where none was given.
        advice: what to do, in words.
    """

    factor: float
    caps: tuple[int | None, ...]
    advice: str


def least_caps(problem: PartitionProblem) -> LeastCaps:
    """What the devices would have to hold for some contiguous stages to fit."""
    tried = [
        _stages(problem, UnitSequence(problem.units, order), devices).least_memory()
        for order in problem.orders.values()
        for devices in _device_orders(problem)
    ]
    factor = min(one[0] for one in tried)
    least = "least " if all(exact for _, _, exact in tried) else ""
    caps = tuple(
        None if device.memory_cap_bytes is None else math.ceil(device.memory_cap_bytes * factor * (1 - _ROUNDING))
        for device in problem.devices
    )
    if factor <= 1:
        return LeastCaps(factor=factor, caps=caps, advice="algorithm 'auto' finds stages that fit: use it")
    different = {cap for cap in caps if cap is not None}
    if len(different) == 1:
        advice = f"the {least}cap that works for every device is {gib(different.pop())}"
    else:
        advice = f"the {least}caps that work are {factor:.4f} times those given"
    return LeastCaps(factor=factor, caps=caps, advice=advice + "; or use more stages, or a smaller microbatch")


def _nothing_fits(problem: PartitionProblem) -> str:
    caps = {device.memory_cap_bytes for device in problem.devices if device.memory_cap_bytes is not None}
    shown = " and ".join(gib(cap) for cap in sorted(caps))
    buffer = f"{100 * problem.cost_model.memory_buffer:g} % of each kept free"
    return (
        f"expected {problem.stages} stages that fit devices of {shown} with {buffer}, found none; "
        + least_caps(problem).advice
    )
