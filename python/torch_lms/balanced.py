"""`create_balanced_partition`: trace, profile, partition, split, and put the stages on their devices."""

from __future__ import annotations

import math
import pickle
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from torch_lms.device_links import GUESSED_LINK, find_links, is_cuda_here
from torch_lms.errors import PartitionError
from torch_lms.memory_sizes import parse_bytes
from torch_lms.partition.costs import CostGraph, CostModel, DataParallel, DeviceSpec, optimizer_multiplier, slower_of
from torch_lms.partition.interface import Algorithm, Partition, PartitionProblem
from torch_lms.partition.link_spec import LinkSpec
from torch_lms.partition.partitioning import check_algorithm, partition
from torch_lms.partition.recompute_and_swap import RecomputeAndSwap
from torch_lms.partition.relief import KEEP_ALL, MemoryRelief
from torch_lms.partition.steps import TrainingStep
from torch_lms.ranks.circle import Circle
from torch_lms.ranks.members import find_members
from torch_lms.schedules.rules import splits_backward
from torch_lms.stages.cutting import split
from torch_lms.stages.giving_up import can_swap
from torch_lms.stages.materialize import materialize
from torch_lms.stages.placement import Placement, find_device, own_rank, parse_placement
from torch_lms.stages.running import Stages

if TYPE_CHECKING:
    from torch_lms.profile.document import Profile
    from torch_lms.profile.profiler import ProfileConfig
    from torch_lms.profile.tracing import TracedModel

__all__ = ["BalanceConfig", "BalancedPlan", "create_balanced_partition", "plan_balanced_partition"]

_OTHER_LEVELS = {"recorded": "one of a single run, which stops where Python would read other values"}
# What counts where nothing was timed, because the model is on the meta device.
_UNTIMED_ALGORITHM = "parameters"
_ANY_DEVICE_BYTES = 1 << 40  # to look whether a percentage is one
_MOST_REST = 0.5  # a device is as fast after it as after longer rests, for which nobody has to wait
# How long ranks wait for the first one, which traces, profiles and cuts.
_DECIDED, _DECIDING_S = "decided", 3600.0
_HEARD, _HEARING_S = "heard by ", 60.0

Optimizer = torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer] | str | None


@dataclass(frozen=True, kw_only=True)
class BalanceConfig:
    """How `create_balanced_partition` measures, prices and places.

    Attributes:
        profile: how to profile; where it names no device, on the first of the devices that this process has, piece by
            piece if the model is larger than that.
        cost: schedule, microbatches and weights. What runs the stages reads them there: `Stages.cost`.
        links: between the devices, by their names as given; by default measured between devices of this process, and
            guessed, with a warning, between others.
        speeds: of devices, by their names as given, times that of the profiled one; 1 where there is none.
        memory_cap_bytes: of each device: bytes, or a text such as ``"40GiB"``, or ``"80%"`` of what a CUDA device of
            this process has; by default all that such a device has, and no cap elsewhere.
        relief: what stages without room give up until their backward: ``KEEP_ALL`` for nothing, ``RecomputeAndSwap``.
            By default that of ``cost``, if it has one; else stages compute segments again, and where that is not enough
            swap some, if a CUDA device's link to the host was profiled, until they fit.
        materialize: whether to move stages to their devices.
        state_dict: of a model on the meta device.
        init_fn: initialises modules of a model on the meta device.

    Raises:
        ValueError: for a cap that is not positive, a speed that is not positive and finite, or another type.
        LimitError: for a text that is no size.
    """

    profile: ProfileConfig | None = None
    cost: CostModel = field(default_factory=CostModel)
    links: LinkSpec | Mapping[tuple[str, str], LinkSpec] | None = None
    speeds: Mapping[Any, float] | None = None
    memory_cap_bytes: int | str | None = None
    relief: MemoryRelief | None = None
    materialize: bool = True
    state_dict: Mapping[str, Any] | None = None
    init_fn: Callable[[nn.Module], None] | None = None

    def __post_init__(self) -> None:
        self._check_types()
        cap = self.memory_cap_bytes
        if isinstance(cap, str):
            parse_bytes(cap, total_bytes=_ANY_DEVICE_BYTES)
        elif cap is not None and (isinstance(cap, bool) or not isinstance(cap, Integral) or cap <= 0):
            raise ValueError(
                f"expected a positive memory cap in bytes or a text such as '40GiB', found {cap!r}; None means the "
                "device's own"
            )
        for name, speed in (self.speeds or {}).items():
            if isinstance(speed, bool) or not isinstance(speed, Real) or not 0 < speed < math.inf:
                raise ValueError(
                    f"expected a positive and finite speed of {name}, found {speed!r}; 1 is the profiled device's"
                )

    def _check_types(self) -> None:
        if self.profile is not None:
            from torch_lms.profile.profiler import ProfileConfig

            if not isinstance(self.profile, ProfileConfig):
                raise ValueError(f"expected a ProfileConfig for profile, found {self.profile!r}; give one")
        for name, kinds, optional in (
            ("cost", CostModel, False),
            ("links", (LinkSpec, Mapping), True),
            ("speeds", Mapping, True),
            ("materialize", bool, False),
            ("state_dict", Mapping, True),
        ):
            value = getattr(self, name)
            if not (isinstance(value, kinds) or (optional and value is None)):
                wanted = " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
                raise ValueError(f"expected a {wanted} for {name}, found {value!r}; give one")
        if self.relief is not None and (isinstance(self.relief, type) or not hasattr(self.relief, "relieve")):
            raise ValueError(f"expected KEEP_ALL or a RecomputeAndSwap for relief, found {self.relief!r}; give one")
        if self.init_fn is not None and not callable(self.init_fn):
            raise ValueError(f"expected a function of a module for init_fn, found {self.init_fn!r}; give one")


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
    devices: Iterable[Any],
    *sample_input: Any,
    algorithm: str | Algorithm = "auto",
    optimizer: Optimizer = None,
    config: BalanceConfig | None = None,
    **sample_kwargs: Any,
) -> Stages:
    """Cuts a model into stages of equal time that fit their devices, and puts them there.

        stages = create_balanced_partition(model, ["cuda:0", "cuda:1"], ids, optimizer=torch.optim.AdamW)
        optimizer = torch.optim.AdamW(stages.parameters())
        for ids, targets in batches:
            cross_entropy(stages(ids), targets.to(stages[-1].device)).backward()
            optimizer.step()
            optimizer.zero_grad()

    In one process the stages train like this, one after the other; `torch_lms.pipeline.Pipeline` has one process for
    each of them and all work at once. In a program with several ranks all ranks call this alike: rank 0 profiles, all
    take its partition, and each materialises only the stages of its own: those of devices like ``"rank:1/cuda:0"``,
    else stage s on rank ``s % ranks``.

    Args:
        model: on a device, or on the meta device: then its parameters' sizes count, and stages come to be one by one.
        devices: one for each stage.
        sample_input: arguments of one microbatch, on any device.
        algorithm: name of a partition algorithm, or one's own.
        optimizer: what will train it, for the memory that it needs: an optimizer of this model or a class such as
            ``torch.optim.SGD`` is measured, a name such as ``"adamw"`` looked up; None leaves it to ``config.cost``,
            which counts Adam's.
        config: prices, caps and more.
        sample_kwargs: keyword arguments of one microbatch.

    Returns:
        The stages, in order: a sequence of modules, and one module of them all.

    Raises:
        PartitionError: if there are more stages than nodes, a device is not there, the model cannot be cut, the
            optimizer is not known, or nothing fits.
        ProfileError: if the model does not run with the sample, or the optimizer makes no step.
    """
    config = _known(config)
    plan = plan_balanced_partition(
        model, devices, *sample_input, algorithm=algorithm, optimizer=optimizer, config=config, **sample_kwargs
    )
    stages = split(plan.traced, plan.partition.stage_of, model=model, relief=plan.partition.stage_relief)
    if config.materialize:
        for stage, place in zip(stages, _placements(plan.partition.devices), strict=False):
            stage.placement = place
            if place.is_local(own_rank()):
                materialize(stage, place.device, state_dict=config.state_dict, init_fn=config.init_fn)
    return Stages(stages, partition=plan.partition, cost=config.cost)


def plan_balanced_partition(
    model: nn.Module | TracedModel,
    devices: Iterable[Any],
    *sample_input: Any,
    algorithm: str | Algorithm = "auto",
    optimizer: Optimizer = None,
    config: BalanceConfig | None = None,
    **sample_kwargs: Any,
) -> BalancedPlan:
    """Everything up to the cut: traces, unless that was done, profiles and partitions.

    The arguments are those of `create_balanced_partition`.
    """
    from torch_lms.profile.profiler import profile
    from torch_lms.profile.tracing import TracedModel, trace

    # Made first, as circles are counted: a call that fails on one rank alone must count there, too.
    circle = Circle(find_members(None, "group"), "partition") if _ranks() > 1 else None
    config, listed = _known(config), _listed(devices)
    check_algorithm(algorithm)
    config = replace(config, cost=_priced(config.cost, optimizer))
    places = [_found(place) for place in _placements([str(device) for device in listed])]
    traced = model if isinstance(model, TracedModel) else trace(model, sample_input, sample_kwargs)
    if traced.graph_module is None:
        split(traced, {})  # says what could not be traced
    if traced.level != "operator":
        found_instead = _OTHER_LEVELS.get(traced.level, "one of modules: borders fall between these only")
        warnings.warn(f"expected a graph of operators, found {found_instead}; {'; '.join(traced.notes)}", stacklevel=2)

    names = _names(listed, places)

    def decide() -> tuple[Profile, Partition]:
        measured = None if isinstance(optimizer, str) else optimizer
        settings = _profile_settings(traced.model, names, places, config)
        found = profile(traced, *sample_input, optimizer=measured, config=settings, **sample_kwargs)
        return found, _partition(found, names, places, _speeds(listed, names, config), algorithm, config)

    return BalancedPlan(traced, *(decide() if circle is None else _decided_by_the_first_rank(circle, decide)))


def _known(config: BalanceConfig | None) -> BalanceConfig:
    if config is not None and not isinstance(config, BalanceConfig):
        raise PartitionError(
            f"expected a BalanceConfig as config, found {type(config).__name__}; a ProfileConfig goes into "
            "BalanceConfig(profile=...), other settings under their names"
        )
    return BalanceConfig() if config is None else config


def _listed(devices: Iterable[Any]) -> list[Any]:
    if isinstance(devices, str) or not isinstance(devices, Iterable):
        raise PartitionError(
            f"expected a device for each stage, found {devices!r}; give a list of them, such as ['cpu', 'cpu']"
        )
    listed = list(devices)
    if not listed:
        raise PartitionError("expected at least one device, found none; name one for each stage")
    return listed


def _decided_by_the_first_rank(
    circle: Circle, decide: Callable[[], tuple[Profile, Partition]]
) -> tuple[Profile | None, Partition]:
    """What rank 0 decides, told to all; if it fails, all do.

    They hear of it through the store: a broadcast of NCCL would be a kernel that waits on each of their devices, beside
    which rank 0 could not measure the links to these, and would find no memory where rank 0 has run out of it.
    """
    if own_rank() == 0:
        try:
            profile, found = decide()
            told = pickle.dumps((found, ""))
        except BaseException as error:
            why = "".join(traceback.format_exception_only(type(error), error)).strip()
            circle.put(_DECIDED, pickle.dumps((None, why)))
            if isinstance(error, Exception):
                _wait_until_heard(circle)
            raise
        circle.put(_DECIDED, told)
        _wait_until_heard(circle)
        return profile, found
    answer = circle.wait(_DECIDED, _DECIDING_S)
    if answer is None:
        raise PartitionError(
            f"expected a partition from rank 0 in {_DECIDING_S:.0f} s, found none; see what rank 0 does, and call this "
            "on all ranks alike"
        )
    heard, why = pickle.loads(answer)
    circle.put(f"{_HEARD}{own_rank()}", b"")
    if why:
        raise PartitionError(f"expected a partition from rank 0, found that it failed: {why}")
    return None, heard


def _wait_until_heard(circle: Circle) -> None:
    """The store may be this process's, which may end now; not for long, as another rank may have failed by itself."""
    end = time.monotonic() + _HEARING_S
    for rank in range(1, _ranks()):
        circle.wait(f"{_HEARD}{rank}", end - time.monotonic())


def _priced(cost: CostModel, optimizer: Any) -> CostModel:
    """The prices with those of an optimizer that is looked up; others are measured."""
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer) or callable(optimizer):
        return cost
    return replace(cost, optimizer_multiplier=optimizer_multiplier(optimizer))


def _profile_settings(
    model: nn.Module, names: Sequence[str], places: Sequence[Placement], config: BalanceConfig
) -> ProfileConfig:
    """On the device that will run it, so far as it is here, and as the schedule will."""
    from torch_lms.profile.devices import device_of
    from torch_lms.profile.profiler import ProfileConfig

    settings = config.profile or ProfileConfig()
    here = next((place.device for place in places if place.is_local(own_rank())), None)
    if settings.device is None and here is not None and "meta" not in (here.type, device_of(model).type):
        settings = replace(settings, device=here)
    if settings.accumulate is None:
        settings = replace(settings, accumulate=config.cost.microbatches > 1)
    if settings.rest_share is None:
        rest_share = TrainingStep.of(names, config.cost).rest_share(config.cost)
        settings = replace(settings, rest_share=min(rest_share, _MOST_REST))
    if settings.two_parts is None:
        settings = replace(settings, two_parts=splits_backward(config.cost.schedule))
    return settings


def _speeds(devices: Sequence[Any], names: Sequence[str], config: BalanceConfig) -> list[float]:
    """Of each stage's device: under its name as given, or with its rank where several have that one."""
    given = {str(name): speed for name, speed in (config.speeds or {}).items()}
    found = [given.get(name, given.get(str(device), 1.0)) for name, device in zip(names, devices, strict=True)]
    unknown = set(given) - {*names, *map(str, devices)}
    if unknown:
        raise PartitionError(
            f"expected speeds of devices among {', '.join(dict.fromkeys(names))}, found one of "
            f"{', '.join(sorted(unknown))}; name devices as they are given"
        )
    return found


def _partition(
    profile: Profile,
    names: Sequence[str],
    places: Sequence[Placement],
    speeds: Sequence[float],
    algorithm: str | Algorithm,
    config: BalanceConfig,
) -> Partition:
    may_measure = config.profile is None or config.profile.links
    links = config.links if config.links is not None else find_links(profile, names, places, may_measure)
    problem = PartitionProblem(
        graph=CostGraph.from_profile(profile),
        devices=tuple(
            DeviceSpec(name=name, memory_cap_bytes=_cap(place, config), speed=speed)
            for name, place, speed in zip(names, places, speeds, strict=True)
        ),
        links=links,
        cost_model=replace(config.cost, relief=_relief(profile, config), data_parallel=_copies(config.cost, links)),
    )
    if algorithm == "auto" and not profile.timed:
        algorithm = _UNTIMED_ALGORITHM
    return partition(problem, algorithm)


def _copies(cost: CostModel, links: LinkSpec | Mapping[tuple[str, str], LinkSpec]) -> DataParallel:
    """Copies of the pipeline, on devices as far from each other as the stages' are unless their link is known."""
    copies = cost.data_parallel
    if copies.ranks == 1 or copies.link is not None:
        return copies
    between = [links] if isinstance(links, LinkSpec) else list(links.values())
    return replace(copies, link=min(between, key=lambda link: link.bytes_per_us, default=GUESSED_LINK))


def _relief(profile: Profile, config: BalanceConfig) -> MemoryRelief:
    if config.relief is not None:
        return config.relief
    own = config.cost.relief
    return own if own is not KEEP_ALL else RecomputeAndSwap(host_link=_host_link(profile), swap_last=True)


def _host_link(profile: Profile) -> LinkSpec | None:
    """The slower way between the profiled device and the host; None where it was not profiled, or nothing can swap."""
    device = profile.device.partition(" ")[0]
    ways = [link for link in profile.links if {link.source, link.target} == {device, "cpu"}]
    return slower_of(ways) if ways and can_swap() else None


def _cap(place: Placement, config: BalanceConfig) -> int | None:
    has = torch.cuda.get_device_properties(place.device).total_memory if is_cuda_here(place.device) else None
    cap = config.memory_cap_bytes
    return parse_bytes(cap, total_bytes=has) if isinstance(cap, str) else has if cap is None else cap


def _placements(devices: Sequence[str]) -> list[Placement]:
    """Stages on devices without a rank belong to the ranks in turn, where there are several."""
    places = [parse_placement(device) for device in devices]
    if _ranks() == 1:
        return places
    return [
        place if place.rank is not None else Placement(place.device, stage % _ranks())
        for stage, place in enumerate(places)
    ]


def _names(devices: Sequence[Any], places: Sequence[Placement]) -> list[str]:
    """As given, unless one name stands for devices of several ranks."""
    names = [str(device) for device in devices]
    return names if len(set(names)) == len(set(places)) else [str(place) for place in places]


def _found(place: Placement) -> Placement:
    """The same place, its device with an index, if it is one of this process."""
    return replace(place, device=find_device(place.device)) if place.is_local(own_rank()) else place


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
