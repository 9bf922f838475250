"""`profile`: traces a model, runs it, and writes down what each node costs."""

from __future__ import annotations

import gc
import warnings
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from torch_lms.devices import find_device
from torch_lms.errors import ProfileError
from torch_lms.profile.arguments import Sample, bind_sample, check_model
from torch_lms.profile.config import ProfileConfig
from torch_lms.profile.devices import device_of, fits, made_on
from torch_lms.profile.document import Profile
from torch_lms.profile.interpreter import trace_undone
from torch_lms.profile.preserving import is_lack_of_memory, placed_on, preserved
from torch_lms.profile.profile_run import ProfileRun
from torch_lms.profile.progress import Progress
from torch_lms.profile.tracing import TracedModel, trace_sample

__all__ = ["ProfileConfig", "profile"]


def profile(
    model: nn.Module | TracedModel,
    *sample_args: Any,
    optimizer: Any = None,
    config: ProfileConfig | None = None,
    **sample_kwargs: Any,
) -> Profile:
    """Profiles a model: what each node of its graph costs in time and memory.

    The model is run as it is, in training or evaluation mode, and left as it was: parameters, buffers, gradients and
    the state of random numbers. The backward starts from the loss, if the model returns one (a scalar, or an attribute
    ``loss``), else from all of its outputs.

    Args:
        model: on any device; on the meta device sizes are measured, but no times. A traced model is not traced again.
        sample_args: what the model is called with; one microbatch.
        optimizer: an optimizer of this model, or what makes one of a list of parameters, such as
            ``torch.optim.AdamW``: the state that it keeps for each parameter is measured.
        config: how often it is run, and where.
        sample_kwargs: arguments by name; non-tensors are constants.

    Raises:
        ProfileError: if the model does not run with the sample (names the user's line), or a device is not there.
    """
    config = config or ProfileConfig()
    whole = model.model if isinstance(model, TracedModel) else model
    check_model(whole)
    device = find_device(config.device, ProfileError) if config.device is not None else device_of(whole)
    _check_device(whole, device)
    run = partial(_profile_on, device, whole, model, bind_sample(whole, sample_args, sample_kwargs), optimizer)
    if config.pieces is not None or device_of(whole) == device:
        return run(replace(config, pieces=bool(config.pieces)))
    reason = f"{type(whole).__name__} is larger than what is free on {device}"
    if fits(whole, device):
        try:
            return run(replace(config, pieces=False))
        except RuntimeError as error:
            if not is_lack_of_memory(error):
                raise
            reason = f"a step of {type(whole).__name__} needs more memory than is free on {device}"
        _give_back(device)
    warnings.warn(
        f"{reason}: it is profiled piece by piece, which takes far longer; give a smaller sample, or say "
        "ProfileConfig(pieces=True)",
        stacklevel=2,
    )
    return run(replace(config, pieces=True), reason)


def _check_device(model: nn.Module, device: torch.device) -> None:
    home = device_of(model)
    if home.type == "meta" and device.type != "meta":
        raise ProfileError(
            f"expected a model with values to run on {device}, found {type(model).__name__} on the meta device; "
            "leave the device out for sizes only, or materialize the model"
        )
    if device.type == "meta" and home.type != "meta":
        raise ProfileError(
            f"expected a model on the meta device to measure sizes only, found {type(model).__name__} on {home}; build "
            "it there: with torch.device('meta')"
        )


def _profile_on(
    device: torch.device,
    whole: nn.Module,
    model: nn.Module | TracedModel,
    sample: Sample,
    optimizer: Any,
    config: ProfileConfig,
    note: str = "",
) -> Profile:
    """One try, whole or in pieces; the model is put back."""
    home = device_of(whole)
    traced = model if isinstance(model, TracedModel) else None
    with ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
            stack.callback(_give_back, device)
        if home != device and not config.pieces:
            stack.enter_context(placed_on(whole, device))
            if traced is not None and traced.graph_module is not None:  # it has constants of its own
                stack.enter_context(placed_on(traced.graph_module, device))
        stack.enter_context(preserved(whole, sample))
        progress = stack.enter_context(Progress(config.progress, type(whole).__name__))
        run = ProfileRun(whole, sample.to(home if config.pieces else device), device, config, progress)
        run.notes += [note] if note else []
        if traced is None:
            with progress.phase("tracing"):
                traced = trace_sample(whole, run.sample, sources=config.sources)
            home = device_of(whole)  # where it is traced
        if home != device and traced.graph_module is not None:
            stack.enter_context(made_on(traced.graph_module, home, device))
        stack.enter_context(trace_undone(replace(traced, sample=run.sample)))
        return run.measure(traced, optimizer)


def _give_back(device: torch.device) -> None:
    """Frees what values in cycles hold, and what PyTorch caches: NCCL has its memory beside that."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
