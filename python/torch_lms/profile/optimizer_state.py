"""The state that an optimizer keeps for each parameter, measured by letting it make one step on copies."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from torch_lms._torch_compat import named_parameters_with_ties
from torch_lms.errors import ProfileError
from torch_lms.profile.storages import tensor_bytes, tensors_in

__all__ = ["measure_optimizer"]


def measure_optimizer(model: nn.Module, optimizer: Any) -> Mapping[str, int] | None:
    """Bytes of optimizer state of each trainable parameter, under its first name.

    An optimizer that has made steps is read. Else a new one of its class and options makes a step on a copy of each
    parameter, one after the other; the model's own parameters stay untouched.

    Args:
        model: its parameters are looked up in the optimizer.
        optimizer: of these parameters, or a callable that makes one of a list of parameters; None measures nothing.

    Raises:
        ProfileError: if no such optimizer can be made.
    """
    if optimizer is None:
        return None
    if not isinstance(optimizer, torch.optim.Optimizer) and not callable(optimizer):
        raise ProfileError(
            f"expected an optimizer or what makes one, such as torch.optim.AdamW, found {optimizer!r}; pass one"
        )
    found: dict[str, int] = {}
    seen: set[int] = set()
    for name, parameter in named_parameters_with_ties(model):
        if id(parameter) in seen or not parameter.requires_grad:
            continue
        seen.add(id(parameter))
        nbytes = _state_bytes(optimizer, parameter)
        if nbytes is not None:
            found[name] = nbytes
    return found


def _state_bytes(optimizer: Any, parameter: nn.Parameter) -> int | None:
    """Of one parameter; None if the optimizer does not train it."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return _measure(optimizer, parameter)
    state = optimizer.state.get(parameter)
    if state:
        return sum(map(tensor_bytes, tensors_in(dict(state))))
    for group in optimizer.param_groups:
        if any(parameter is other for other in group["params"]):
            return _measure(partial(_copy_of, optimizer, group), parameter)
    return None


def _copy_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameters: list[nn.Parameter]) -> Any:
    """An optimizer of the same class and options for other parameters, without state and hooks."""
    twin = object.__new__(type(optimizer))
    hooks: dict[str, Any] = {name: OrderedDict() for name in vars(optimizer) if name.endswith("_hooks")}
    kept = {name: value for name, value in vars(optimizer).items() if name != "step"}  # schedulers wrap it
    vars(twin).update({**kept, **hooks, "state": defaultdict(dict)})
    twin.param_groups = [{**group, "params": parameters}]
    return twin


def _measure(make: Any, parameter: nn.Parameter) -> int:
    copy = nn.Parameter(torch.zeros_like(parameter, requires_grad=False))
    copy.grad = torch.zeros_like(copy)
    try:
        optimizer = make([copy])
        optimizer.step()
    except Exception as error:
        raise ProfileError(
            f"expected an optimizer that makes a step for one parameter, found {type(error).__name__}: {error}; "
            "pass a callable that makes an optimizer of a list of parameters"
        ) from error
    return sum(map(tensor_bytes, tensors_in(dict(optimizer.state[copy]))))
