"""`create_balanced_partition`: trace, profile, partition, split, and put the stages on their devices."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from torch_lms.errors import PartitionError
from torch_lms.partition.costs import CostGraph, CostModel, DeviceSpec, LinkSpec
from torch_lms.partition.interface import Algorithm, Partition, PartitionProblem
from torch_lms.partition.partitioning import partition
from torch_lms.stages.cutting import split
from torch_lms.stages.materialize import materialize
from torch_lms.stages.placement import Placement, find_device, parse_placement
from torch_lms.stages.stage import Stage

if TYPE_CHECKING:
    from torch_lms.profile.document import Profile
    from torch_lms.profile.profiler import ProfileConfig
    from torch_lms.profile.tracing import TracedModel

__all__ = ["BalanceConfig", "BalancedPlan", "create_balanced_partition", "plan_balanced_partition"]

# What counts where nothing was timed, because the model is on the meta device.
_UNTIMED_ALGORITHM = "parameters"
# Where links were not measured: about what Gloo does between two processes of one machine.
_LOOPBACK = LinkSpec(bytes_per_us=1000.0, latency_us=100.0)


@dataclass(frozen=True, kw_only=True)
class BalanceConfig:
    """How `create_balanced_partition` measures, prices and places.

    Attributes:
        profile: how to profile; by default on the first device that this process has.
        cost: schedule, microbatches and weights.
        links: between the devices, by their names as given; by default as profiled, where that was done.
        memory_cap_bytes: of each device; by default what a CUDA device has and no cap elsewhere.
        materialize: whether to move stages to their devices.
        state_dict: of a model on the meta device.
        init_fn: initialises modules of a model on the meta device.

    Raises:
        ValueError: for a cap that is not positive.
    """

    profile: ProfileConfig | None = None
    cost: CostModel = field(default_factory=CostModel)
    links: LinkSpec | Mapping[tuple[str, str], LinkSpec] | None = None
    memory_cap_bytes: int | None = None
    materialize: bool = True
    state_dict: Mapping[str, Any] | None = None
    init_fn: Callable[[nn.Module], None] | None = None

    def __post_init__(self) -> None:
        if self.memory_cap_bytes is not None and self.memory_cap_bytes <= 0:
            raise ValueError(
                f"expected a positive memory cap, found {self.memory_cap_bytes}; None means the device's own"
            )


@dataclass(frozen=True)
class BalancedPlan:
    """What was found out about a model, and where to cut it.

    Attributes:
        traced: the graph.
        profile: what its nodes cost; None on the ranks that were told the partition.
        partition: the stage of each node.
    """

    traced: TracedModel
    profile: Profile | None
    partition: Partition


def create_balanced_partition(
    model: nn.Module,
    devices: Sequence[Any],
    *sample_input: Any,
    algorithm: str | Algorithm = "auto",
    optimizer: torch.optim.Optimizer | str | None = None,
    config: BalanceConfig | None = None,
    **sample_kwargs: Any,
) -> list[Stage]:
    """Cuts a model into stages of equal time that fit their devices, and puts them there.

        stages = create_balanced_partition(model, ["cuda:0", "cuda:1"], ids)

    In a program with several ranks all ranks call it alike: rank 0 profiles, all take its partition, and each
    materialises only the stages of its own: those of devices like ``"rank:1/cuda:0"``, else stage s on rank
    ``s % ranks``.

    Args:
        model: on a device, or on the meta device: then its parameters' sizes count, and stages come to be one by one.
        devices: one for each stage.
        sample_input: arguments of one microbatch.
        algorithm: name of a partition algorithm, or one's own.
        optimizer: what will train it, an optimizer or a name such as ``"adamw"``, for the memory that it needs.
        config: prices, caps and more.
        sample_kwargs: keyword arguments of one microbatch.

    Returns:
        The stages, each an nn.Module, in order.

    Raises:
        PartitionError: if there are more stages than nodes, a device is not there, the model cannot be traced, or
            nothing fits.
    """
    config = config or BalanceConfig()
    plan = plan_balanced_partition(
        model, devices, *sample_input, algorithm=algorithm, optimizer=optimizer, config=config, **sample_kwargs
    )
    stages = split(plan.traced, plan.partition.stage_of, model=model)
    if config.materialize:
        for stage, place in zip(stages, _placements(plan.partition.devices), strict=False):
            if place.is_local(_rank()):
                materialize(stage, place.device, state_dict=config.state_dict, init_fn=config.init_fn)
    return stages


def plan_balanced_partition(
    model: nn.Module | TracedModel,
    devices: Sequence[Any],
    *sample_input: Any,
    algorithm: str | Algorithm = "auto",
    optimizer: torch.optim.Optimizer | str | None = None,
    config: BalanceConfig | None = None,
    **sample_kwargs: Any,
) -> BalancedPlan:
    """Everything up to the cut: traces, unless that was done, profiles and partitions.

    The arguments are those of `create_balanced_partition`.
    """
    from torch_lms.profile.tracing import TracedModel, trace

    config = config or BalanceConfig()
    if not devices:
        raise PartitionError("expected at least one device, found none; name one for each stage")
    places = _placements([str(device) for device in devices])
    for place in places:
        if place.is_local(_rank()):
            find_device(place.device)
    sample_input, sample_kwargs = _distinct(sample_input, sample_kwargs)
    traced = model if isinstance(model, TracedModel) else trace(model, sample_input, sample_kwargs)
    if traced.graph_module is None:
        split(traced, {})  # says what could not be traced
    if traced.level != "operator":
        warnings.warn(
            "expected a graph of operators, found one of modules: borders fall between these only; "
            + "; ".join(traced.notes),
            stacklevel=2,
        )
    profile = found = None
    if _rank() == 0:
        profile = _profile(traced, sample_input, sample_kwargs, optimizer, config)
        found = _partition(profile, devices, places, algorithm, optimizer, config)
    if _ranks() > 1:
        told = [found]
        dist.broadcast_object_list(told, src=0)
        found = told[0]
    assert found is not None
    return BalancedPlan(traced, profile, found)


def _distinct(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copies a tensor that is given twice: a tracer may take two arguments of one tensor for one argument."""
    seen: set[int] = set()

    def copied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or id(value) not in seen:
            seen.add(id(value))
            return value
        return value.clone()

    return tuple(copied(value) for value in args), {name: copied(value) for name, value in kwargs.items()}


def _profile(
    model: TracedModel, args: Sequence[Any], kwargs: Mapping[str, Any], optimizer: Any, config: BalanceConfig
) -> Profile:
    from torch_lms.profile.profiler import ProfileConfig, profile

    measured = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
    return profile(model, *args, optimizer=measured, config=config.profile or ProfileConfig(), **kwargs)


def _partition(
    profile: Profile,
    devices: Sequence[Any],
    places: Sequence[Placement],
    algorithm: str | Algorithm,
    optimizer: Any,
    config: BalanceConfig,
) -> Partition:
    cost = config.cost
    if isinstance(optimizer, str):
        from dataclasses import replace

        from torch_lms.partition.costs import optimizer_multiplier

        cost = replace(cost, optimizer_multiplier=optimizer_multiplier(optimizer))
    specs = tuple(
        DeviceSpec(name=str(device), memory_cap_bytes=_cap(place, config))
        for device, place in zip(devices, places, strict=False)
    )
    links = config.links or _measured_links(
        profile, {str(place.device): spec.name for place, spec in zip(places, specs, strict=False)}
    )
    problem = PartitionProblem(graph=CostGraph.from_profile(profile), devices=specs, links=links, cost_model=cost)
    if algorithm == "auto" and not profile.timed:
        algorithm = _UNTIMED_ALGORITHM
    return partition(problem, algorithm)


def _measured_links(profile: Profile, names: Mapping[str, str]) -> LinkSpec | Mapping[tuple[str, str], LinkSpec]:
    """The profiled links between the devices, if all of them are there; else a guess."""
    found = {
        (names[link.source], names[link.target]): LinkSpec(bytes_per_us=link.bytes_per_us, latency_us=link.latency_us)
        for link in profile.links
        if link.source in names and link.target in names
    }
    if found and len(found) == len(names) * (len(names) - 1):
        return found
    return _LOOPBACK


def _cap(place: Placement, config: BalanceConfig) -> int | None:
    if config.memory_cap_bytes is not None:
        return config.memory_cap_bytes
    here = place.device.type == "cuda" and (place.device.index or 0) < torch.cuda.device_count()
    return torch.cuda.get_device_properties(place.device).total_memory if here else None


def _placements(devices: Sequence[str]) -> list[Placement]:
    """Stages on devices without a rank belong to the ranks in turn, where there are several."""
    places = [parse_placement(device) for device in devices]
    if _ranks() == 1:
        return places
    return [
        place if place.rank is not None else Placement(place.device, stage % _ranks())
        for stage, place in enumerate(places)
    ]


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
