"""Gives a stage parameters of its own on its device; those of a model on the meta device come to be only now.

A model too large for any one place is built on the meta device, cut there, and each process materialises its stage
alone: from a state dict, by the modules' own initialisation, or by a function.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from torch_lms.errors import PartitionError
from torch_lms.stages.installation import named_tensors
from torch_lms.stages.placement import find_device
from torch_lms.stages.stage import Stage
from torch_lms.stages.state_dicts import find_entry

__all__ = ["materialize"]

_RESETS = ("reset_parameters", "_reset_parameters")


def materialize(
    stage: Stage,
    device: Any,
    *,
    state_dict: Mapping[str, Any] | None = None,
    init_fn: Callable[[nn.Module], None] | None = None,
) -> Stage:
    """Makes a stage independent of the model that it was cut from, on a device.

    Parameters that are on the device already and in no other stage stay the same objects; all others are copied.
    Parameters and buffers on the meta device are made from ``state_dict``, else by ``init_fn``, else by the modules'
    own ``reset_parameters``. Weights tied across stages are initialised in each; `torch_lms.pipeline.Pipeline` then
    gives all of them the values of the first.

    Args:
        stage: changed in place.
        device: of this process.
        state_dict: of the model or of the stage; what it lacks keeps its value.
        init_fn: called with each submodule that had something on the meta device.

    Returns:
        The stage.

    Raises:
        PartitionError: if it is no stage, the device is not there, or something on the meta device got no value.
    """
    if not isinstance(stage, Stage):
        raise PartitionError(f"expected a Stage, found {type(stage).__name__}; give one of those that split() makes")
    target = find_device(device)
    fresh = (
        {name for name, value in named_tensors(stage) if value.device.type == "meta"}
        if target.type != "meta"
        else set()
    )
    _own_modules(stage, {})
    _own_tensors(stage, target)
    if fresh:
        _initialise(stage, fresh, state_dict, init_fn)
    stage.set_device(target)
    if state_dict is not None:
        _load(stage, state_dict)
        fresh = {name for name in fresh if find_entry(state_dict, stage, name) is None}
    _check_filled(stage, fresh, known=init_fn is not None)
    return stage


def _own_modules(module: nn.Module, made: dict[int, nn.Module]) -> None:
    """Shallow copies of all submodules, so that exchanging a parameter here leaves the model as it is."""
    module._parameters, module._buffers = module._parameters.copy(), module._buffers.copy()
    module._modules = module._modules.copy()
    for name, child in module._modules.items():
        if child is None:
            continue
        if id(child) not in made:
            made[id(child)] = copy.copy(child)
            for key, value in vars(child).items():  # such as an LSTM's list of its weights
                if type(value) is list:
                    vars(made[id(child)])[key] = list(value)
            _own_modules(made[id(child)], made)
        module._modules[name] = made[id(child)]


def _own_tensors(stage: Stage, device: torch.device) -> None:
    shared = set(stage.shared)
    made: dict[int, torch.Tensor] = {}
    for prefix, module in stage.named_modules(remove_duplicate=False):
        for name, value in [*module._parameters.items(), *module._buffers.items()]:
            if value is None:
                continue
            path = f"{prefix}.{name}" if prefix else name
            if id(value) not in made:
                made[id(value)] = _own_tensor(value, device, keep=path not in shared)
                made[id(made[id(value)])] = made[id(value)]
            if made[id(value)] is value:
                continue
            if module is stage:
                stage.hold(name, made[id(value)])
            else:
                setattr(module, name, made[id(value)])


def _own_tensor(value: torch.Tensor, device: torch.device, keep: bool) -> torch.Tensor:
    if value.device.type == "meta" and device.type != "meta":
        made = torch.empty_like(value, device=device)
        if made.is_floating_point() or made.is_complex():
            made.data.fill_(float("nan"))  # what stays like this was not initialised
        elif made.dtype != torch.bool:
            made.fill_(torch.iinfo(made.dtype).min)
    else:
        made = value.detach().to(device)
        if made.data_ptr() == value.data_ptr() and made.device == value.device:
            if keep:
                return value
            made = made.clone()
    return (
        nn.Parameter(made.detach(), requires_grad=value.requires_grad)
        if isinstance(value, nn.Parameter)
        else made.detach()
    )


def _initialise(
    stage: Stage, fresh: set[str], state_dict: Mapping[str, Any] | None, init_fn: Callable[[nn.Module], None] | None
) -> None:
    for prefix, module in stage.named_modules():
        own = {f"{prefix}.{name}" if prefix else name for name in (*module._parameters, *module._buffers)} & fresh
        if state_dict is not None:
            own = {name for name in own if find_entry(state_dict, stage, name) is None}
        if not own:
            continue
        if init_fn is not None:
            with torch.no_grad():
                init_fn(module)
            continue
        for reset in _RESETS:
            if hasattr(module, reset):
                getattr(module, reset)()
                break


def _load(stage: Stage, state_dict: Mapping[str, Any]) -> None:
    with torch.no_grad():
        for name, value in named_tensors(stage):
            entry = find_entry(state_dict, stage, name)
            if entry is None:
                continue
            if entry.shape != value.shape:
                raise PartitionError(
                    f"expected {name!r} of shape {tuple(value.shape)} in the state dict, found {tuple(entry.shape)}; "
                    "it belongs to another model"
                )
            value.copy_(entry)


def _check_filled(stage: Stage, fresh: set[str], known: bool) -> None:
    for name, value in named_tensors(stage):
        if name not in fresh or value.numel() == 0:
            continue
        if value.is_floating_point() or value.is_complex():
            empty = bool(value.isnan().all())
        else:
            empty = not known if value.dtype == torch.bool else bool((value == torch.iinfo(value.dtype).min).all())
        if empty:
            raise PartitionError(
                f"expected a value for {name!r} of stage {stage.index}, found it only on the meta device: its module "
                "has no reset_parameters that sets it; pass a state_dict that has it, or an init_fn"
            )
