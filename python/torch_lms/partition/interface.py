"""The one interface of all partition algorithms: a problem goes in, a partition with its figures comes out."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from torch_lms.errors import PartitionError
from torch_lms.partition.bisection import lightest_cuts
from torch_lms.partition.costs import CostGraph, CostModel, DeviceSpec
from torch_lms.partition.figures import Figures, measure
from torch_lms.partition.link_spec import LinkSpec
from torch_lms.partition.orders import candidate_orders
from torch_lms.partition.relief import KEEP_ALL, StageRelief
from torch_lms.partition.steps import TrainingStep
from torch_lms.partition.units import Units, check_partition

__all__ = ["Algorithm", "Partition", "PartitionProblem", "evaluate", "gib", "settle"]

Links = LinkSpec | Mapping[tuple[str, str], LinkSpec]


def gib(nbytes: float) -> str:
    """A size for people."""
    return f"{nbytes:.0f} bytes ({nbytes / 2**30:.3f} GiB)"


@dataclass(frozen=True, kw_only=True)
class PartitionProblem:
    """What is to be cut, for which devices.

    Attributes:
        graph: with its costs.
        devices: one for each stage, in the pipeline's order. A device that is named for several stages has all of
            them: its time and its memory are theirs together.
        links: one for all pairs of devices, or one for each pair by the devices' names; a pair that is only there the
            other way round counts for both ways. Between stages of one device nothing is sent.
        cost_model: prices and the schedule.
        stages: how many; by default as many as there are devices.
        reorder_devices: whether an algorithm may put the devices into another order.

    Raises:
        PartitionError: if there are more stages than nodes, not one device for each stage, a device with two
            descriptions, devices or microbatches that the schedule does not take, or a link to a device that is not
            among them.
    """

    graph: CostGraph
    devices: tuple[DeviceSpec, ...]
    links: Links = field(default_factory=LinkSpec)
    cost_model: CostModel = field(default_factory=CostModel)
    stages: int = 0
    reorder_devices: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", tuple(self.devices))
        if self.stages == 0:
            object.__setattr__(self, "stages", len(self.devices))
        if self.stages < 1:
            raise PartitionError(f"expected at least 1 stage, found {self.stages}; name a device for each stage")
        if len(self.devices) != self.stages:
            raise PartitionError(
                f"expected one device for each of {self.stages} stages, found {len(self.devices)}; "
                "name each device once for each of its stages"
            )
        if not len(self.units):
            raise PartitionError(
                "expected a graph with operations to cut, found none; the model computes nothing of its arguments"
            )
        if self.stages > len(self.units):
            raise PartitionError(
                f"expected at most as many stages as nodes that compute, found {self.stages} stages for "
                f"{len(self.units)}; use fewer stages or trace the model at a finer level"
            )
        self._check_devices()
        self._check_links()

    def _check_devices(self) -> None:
        known: dict[str, DeviceSpec] = {}
        for device in self.devices:
            if known.setdefault(device.name, device) != device:
                raise PartitionError(
                    f"expected one description of {device.name}, found {known[device.name]} and {device}; "
                    "name different devices differently"
                )
        self.step_on(self.devices)

    def _check_links(self) -> None:
        names = {device.name for device in self.devices}
        if isinstance(self.links, LinkSpec):
            return
        for pair in self.links:
            for name in pair:
                if name not in names:
                    known = ", ".join(sorted(names))
                    raise PartitionError(
                        f"expected links between the devices {known}, found one to {name!r}, which is not there; "
                        "add the device or leave the link out"
                    )

    @cached_property
    def units(self) -> Units:
        """The graph's active nodes."""
        return Units(self.graph)

    @cached_property
    def orders(self) -> dict[str, NDArray[np.int64]]:
        """Topological orders of the units by name, the graph's own first."""
        return candidate_orders(self.units)

    def links_between(self, devices: Sequence[DeviceSpec]) -> list[LinkSpec]:
        """The links that devices in this order pass values over."""
        return [self._link(one.name, other.name) for one, other in itertools.pairwise(devices)]

    def step_on(self, devices: Sequence[DeviceSpec]) -> TrainingStep:
        """The schedule on devices in this order.

        Raises:
            PartitionError: if it does not take them, or the microbatches.
        """
        return TrainingStep.of([device.name for device in devices], self.cost_model)

    def devices_of(self, names: Sequence[str]) -> list[DeviceSpec]:
        """The devices of these names."""
        known = {device.name: device for device in self.devices}
        return [known[name] for name in names]

    def stage_of_units(self, found: Partition) -> NDArray[np.int64]:
        """The stage of each unit in a partition of this problem."""
        return np.array([found.stage_of[node.name] for node in self.units.nodes], dtype=np.int64)

    def _link(self, source: str, target: str) -> LinkSpec:
        if source == target:
            return LinkSpec()
        if isinstance(self.links, LinkSpec):
            return self.links
        link = self.links.get((source, target)) or self.links.get((target, source))
        if link is None:
            raise PartitionError(
                f"expected a link from {source} to {target}, found none; add it, or give one LinkSpec for all pairs"
            )
        return link

    @cached_property
    def lower_bound_us(self) -> float:
        """No partition has a smaller largest stage time.

        The mean, or the largest node on the fastest device; for a graph with only one order on equal devices the best
        way to cut it, which is found by bisection.
        """
        speeds = [device.speed for device in self.devices]
        times = self.units.time_us
        bound = max(float(times.sum()) / sum(speeds), float(times.max()) / max(speeds))
        if self.units.chain and len(set(speeds)) == 1:
            marks = [0, *lightest_cuts(times, self.stages), len(times)]
            bound = max(float(times[start:end].sum()) for start, end in itertools.pairwise(marks)) / speeds[0]
        return bound


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Which stage each node belongs to, why, and what that takes.

    Attributes:
        stage_of: of every node of the graph.
        stages: how many.
        algorithm: that made it.
        reason: in words.
        devices: of the stages, in order.
        speeds: of these, times the profiled device's.
        figures: all costs.
        lower_bound_us: of the largest stage time.
    """

    stage_of: Mapping[str, int]
    stages: int
    algorithm: str
    reason: str
    devices: tuple[str, ...]
    speeds: tuple[float, ...]
    figures: Figures
    lower_bound_us: float

    @property
    def stage_time_us(self) -> tuple[float, ...]:
        """Of one microbatch, forward and backward."""
        return self.figures.stage_time_us

    @property
    def stage_memory_bytes(self) -> tuple[int, ...]:
        """Of each stage alone, at its peak in a step."""
        return self.figures.stage_memory_bytes

    @property
    def device_memory_bytes(self) -> tuple[int, ...]:
        """Of all stages of each device together, at their peak in a step."""
        return self.figures.device_memory_bytes

    @property
    def stage_relief(self) -> tuple[StageRelief, ...]:
        """What each stage gives up to fit; empty where none does."""
        return self.figures.stage_relief

    @property
    def cut_bytes(self) -> tuple[int, ...]:
        """Over each border for one microbatch, activations and gradients."""
        pairs = zip(self.figures.cut_forward_bytes, self.figures.cut_backward_bytes, strict=True)
        return tuple(forward + backward for forward, backward in pairs)

    @property
    def bottleneck_us(self) -> float:
        """The largest stage time."""
        return max(self.stage_time_us)

    @property
    def imbalance(self) -> float:
        """The largest stage time over the mean; 1 where nothing takes time."""
        total = sum(self.stage_time_us)
        return self.bottleneck_us * self.stages / total if total > 0 else 1.0

    @property
    def step_us(self) -> float:
        """A training step; see Note [Step time] in ``costs``."""
        return self.figures.step.step_us

    @property
    def bubble(self) -> float:
        """The share of the devices' time without computing."""
        return self.figures.step.bubble

    @property
    def fits(self) -> bool:
        """Whether every device has room for its stages, under its cap less the buffer."""
        return self.figures.fits


class Algorithm(Protocol):
    """Cuts a graph into stages.

    Attributes:
        name: that `partition` knows it by.
        source: the paper or the program that it follows.
    """

    @property
    def name(self) -> str: ...  # noqa: D102 (said above)

    @property
    def source(self) -> str: ...  # noqa: D102 (said above)

    def partition(self, problem: PartitionProblem) -> Partition:
        """A valid partition; one that only looks at time or sizes may not fit, and says so in ``fits``.

        What its stages give up may be an estimate; `settle` says what it is.

        Raises:
            PartitionError: if it finds none.
        """
        ...


def evaluate(
    problem: PartitionProblem,
    stage_of_unit: NDArray[np.int64],
    *,
    algorithm: str,
    reason: str,
    devices: Sequence[DeviceSpec] | None = None,
) -> Partition:
    """The partition that places each unit on a stage, checked and measured."""
    devices = problem.devices if devices is None else devices
    stage_of = problem.units.stages_of_nodes([int(stage) for stage in stage_of_unit], problem.stages)
    check_partition(problem.graph, stage_of, problem.stages)
    links = problem.links_between(devices)
    return Partition(
        stage_of=stage_of,
        stages=problem.stages,
        algorithm=algorithm,
        reason=reason,
        devices=tuple(device.name for device in devices),
        speeds=tuple(device.speed for device in devices),
        figures=measure(problem.units, np.asarray(stage_of_unit, dtype=np.int64), devices, links, problem.cost_model),
        lower_bound_us=problem.lower_bound_us,
    )


def settle(problem: PartitionProblem, found: Partition) -> Partition:
    """The same partition with what its stages give up as a simulation has it; see Note [Two looks] in ``relief``."""
    if problem.cost_model.relief is KEEP_ALL or found.stage_relief:
        return found
    devices = problem.devices_of(found.devices)
    placed = problem.stage_of_units(found)
    links = problem.links_between(devices)
    figures = measure(problem.units, placed, devices, links, problem.cost_model, simulated=True)
    told = "; found by an estimate of what stages give up" if figures.stage_relief else ""
    return replace(found, figures=figures, reason=found.reason + told)
