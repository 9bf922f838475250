"""`fit`: the plan of a model's training step under a limit, made before training begins."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torch_lms.devices import find_device
from torch_lms.errors import ProfileError
from torch_lms.fitting.assembly import assemble_trace
from torch_lms.fitting.durations import DeviceRates, profiled_us, rated_us
from torch_lms.fitting.step import record_step
from torch_lms.memory_sizes import parse_bytes
from torch_lms.plan.planner import make_plan
from torch_lms.plan.trace import Link, Trace
from torch_lms.profile.arguments import Sample, bind_sample, check_model
from torch_lms.profile.devices import device_of, fits
from torch_lms.profile.links import measure_link
from torch_lms.profile.profiler import ProfileConfig, profile
from torch_lms.profile.tracing import TracedModel, trace_sample

if TYPE_CHECKING:
    from torch_lms.plan.document import Plan

__all__ = ["FitConfig", "fit", "trace_step"]

_GRAPHS = ("symbolic", "export", "opened")


def _few_runs() -> ProfileConfig:
    return ProfileConfig(warmup_runs=2, timed_runs=5, links=False)


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """How `fit` measures and plans.

    Attributes:
        profile: how often and where the model runs. `ProfileConfig.pieces` is for models that do not fit the device.
        rates: of a device that is not there: then nothing is run, and times follow from sizes. Models on the meta
            device need them.
        min_bytes: smaller storages stay where they are.
        host_limit: of the host's memory for swapped storages; None for no limit.
        swap: whether storages may leave by a copy.
        recompute: whether they may be dropped and made again.
    """

    profile: ProfileConfig = field(default_factory=_few_runs)
    rates: DeviceRates | None = None
    min_bytes: int | str = 1 << 20
    host_limit: int | str | None = None
    swap: bool = True
    recompute: bool = True


def fit(
    model: nn.Module,
    *sample: Any,
    limit: int | str,
    optimizer: Any = None,
    config: FitConfig | None = None,
    **sample_kwargs: Any,
) -> Plan:
    """Plans a training step of a model under a limit, before it trains: does it fit, how, and how fast?

        plan = torch_lms.fit(model, ids, targets, limit="20GiB", optimizer=torch.optim.AdamW)
        print(plan)

    The step is the model's forward, a backward from its loss (or from all of its outputs), and the optimizer's step,
    one parameter after the other. It runs a few times on the calling thread, and the model is left as it was. A model
    on the meta device needs `FitConfig.rates`.

    Args:
        model: what trains. One that returns its loss is predicted best.
        sample: what it is called with.
        limit: of the device's memory: bytes, or a text such as ``"20GiB"``; no percentage.
        optimizer: of this model, or what makes one of a list of parameters, such as ``torch.optim.AdamW``.
        config: how to measure and plan.
        sample_kwargs: arguments by name.

    Returns:
        The plan, with its predicted time and peak. It is for reading: `torch_lms.enable` takes plans of running
        programs alone, which `torch_lms.current_plan` has.

    Raises:
        LimitError: if no plan keeps the limit; it states the least limit that one keeps.
        ProfileError: if the model does not run with the sample, its device is not there, automatic mode is on, or the
            config is none.
    """
    config = _known(config)
    limit_bytes = parse_bytes(limit)
    host_limit_bytes = None if config.host_limit is None else parse_bytes(config.host_limit)
    trace = trace_step(model, *sample, optimizer=optimizer, config=config, **sample_kwargs)
    return make_plan(
        trace, limit_bytes, host_limit_bytes=host_limit_bytes, swap=config.swap, recompute=config.recompute
    )


def trace_step(
    model: nn.Module, *sample: Any, optimizer: Any = None, config: FitConfig | None = None, **sample_kwargs: Any
) -> Trace:
    """The step that `fit` plans for, as a trace; arguments and errors are those of `fit`."""
    config = _known(config)
    check_model(model)
    bound = bind_sample(model, sample, sample_kwargs)
    if config.rates is not None:
        return _rated(model, bound, optimizer, config, config.rates)
    device = device_of(model) if config.profile.device is None else find_device(config.profile.device, ProfileError)
    if "meta" in (device.type, device_of(model).type):
        raise ProfileError(
            f"expected a model with values to time it, found {type(model).__name__} on the meta device; say what the "
            "device can do: FitConfig(rates=DeviceRates(...)), or materialize the model"
        )
    _check_automatic_mode()
    return _profiled(model, bound, optimizer, config, device)


def _known(config: FitConfig | None) -> FitConfig:
    if config is not None and not isinstance(config, FitConfig):
        raise ProfileError(
            f"expected a FitConfig as config, found {type(config).__name__}; a ProfileConfig goes into "
            "FitConfig(profile=...), other settings under their names"
        )
    return config or FitConfig()


def _rated(model: nn.Module, sample: Sample, optimizer: Any, config: FitConfig, rates: DeviceRates) -> Trace:
    home = device_of(model)
    device = torch.device("cpu") if home.type == "meta" else home
    step = record_step(TracedModel(None, "runtime", model, sample), device, optimizer, fake=True)
    return assemble_trace(
        step, rated_us(step, rates), device=str(device), link=rates.link, min_bytes=parse_bytes(config.min_bytes)
    )


def _profiled(model: nn.Module, sample: Sample, optimizer: Any, config: FitConfig, device: torch.device) -> Trace:
    pieces = config.profile.pieces if config.profile.pieces is not None else not fits(model, device)
    runs_whole = TracedModel(None, "runtime", model, sample)
    traced = trace_sample(model, sample, sources=_GRAPHS) if pieces else runs_whole
    found = profile(traced, *sample.args, config=replace(config.profile, links=False), **sample.kwargs)
    step = record_step(traced, device, optimizer, fake=pieces)
    name = str(device)
    memory_bytes_per_us = 2 * measure_link(name, name).bytes_per_us  # a copy reads and writes
    out, in_ = measure_link(name, "cpu"), measure_link("cpu", name)
    latency_us = max(out.latency_us, in_.latency_us)
    link = Link(out_bytes_per_us=out.bytes_per_us, in_bytes_per_us=in_.bytes_per_us, latency_us=latency_us)
    durations_us = profiled_us(step, found, memory_bytes_per_us)
    return assemble_trace(step, durations_us, device=name, link=link, min_bytes=parse_bytes(config.min_bytes))


def _check_automatic_mode() -> None:
    automatic = sys.modules.get("torch_lms.swap.automatic")
    if automatic is not None and automatic.is_enabled():
        raise ProfileError(
            "expected automatic mode to be off while a model is measured, found it on, which changes when memory is "
            "freed; plan before torch_lms.enable, or call torch_lms.disable first"
        )
