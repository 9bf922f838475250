"""The state that an optimizer keeps for each parameter, measured by letting it make one step on copies."""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from torch_lms._torch_compat import named_parameters_with_ties
from torch_lms.errors import ProfileError
from torch_lms.profile.storages import tensor_bytes, tensors_in

__all__ = ["MakeOptimizer", "make_step", "measure_optimizer", "trained_parameters"]

_RATE = 1e-3  # no state depends on it, and not every class has a default

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


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
    return {
        name: sum(map(tensor_bytes, tensors_in(state)))
        for name, parameter, make in trained_parameters(model, optimizer)
        for state in [_state_of(optimizer, parameter, make)]
    }


def trained_parameters(model: nn.Module, optimizer: Any) -> Iterator[tuple[str, nn.Parameter, MakeOptimizer]]:
    """Each parameter that an optimizer trains, under its first name, and what makes such an optimizer of others.

    Args:
        model: its parameters are looked up in the optimizer.
        optimizer: of these parameters, or a callable that makes one of a list of parameters.

    Raises:
        ProfileError: if it is neither.
    """
    if not isinstance(optimizer, torch.optim.Optimizer) and not callable(optimizer):
        raise ProfileError(
            f"expected an optimizer or what makes one, such as torch.optim.AdamW, found {optimizer!r}; pass one"
        )
    seen: set[int] = set()
    for name, parameter in named_parameters_with_ties(model):
        if id(parameter) in seen or not parameter.requires_grad:
            continue
        seen.add(id(parameter))
        make = _maker(optimizer, parameter)
        if make is not None:
            yield name, parameter, make


def make_step(make: MakeOptimizer, *parameters: nn.Parameter) -> torch.optim.Optimizer:
    """An optimizer of some parameters, which have gradients, that has made its first step.

    Raises:
        ProfileError: if it does not.
    """
    try:
        optimizer = make([*parameters])
        optimizer.step()
    except Exception as error:
        copies = "copies of parameters without values" if parameters[0].is_meta else "dense copies of parameters"
        raise ProfileError(
            f"expected an optimizer that makes a step for {copies}, found {type(error).__name__}: {error}; pass a "
            "callable that makes one, such as torch.optim.AdamW, of a list of parameters, or leave the optimizer out: "
            "its state and its step are not in the result then"
        ) from error
    return optimizer


def _maker(optimizer: Any, parameter: nn.Parameter) -> MakeOptimizer | None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        make: MakeOptimizer = optimizer
        if isinstance(optimizer, type) and "lr" in inspect.signature(optimizer).parameters:
            make = partial(optimizer, lr=_RATE)
        return make
    for group in optimizer.param_groups:
        if any(parameter is other for other in group["params"]):
            return partial(_copy_of, optimizer, group)
    return None


def _state_of(optimizer: Any, parameter: nn.Parameter, make: MakeOptimizer) -> dict[str, Any]:
    """As it is, or after a step on a copy."""
    if isinstance(optimizer, torch.optim.Optimizer) and optimizer.state.get(parameter):
        return dict(optimizer.state[parameter])
    copy = nn.Parameter(torch.zeros_like(parameter, requires_grad=False))
    copy.grad = torch.zeros_like(copy)
    return dict(make_step(make, copy).state[copy])


def _copy_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameters: list[nn.Parameter]) -> Any:
    """An optimizer of the same class and options for other parameters, without state and hooks."""
    twin = object.__new__(type(optimizer))
    hooks: dict[str, Any] = {name: OrderedDict() for name in vars(optimizer) if name.endswith("_hooks")}
    kept = {name: value for name, value in vars(optimizer).items() if name != "step"}  # schedulers wrap it
    vars(twin).update({**kept, **hooks, "state": defaultdict(dict)})
    twin.param_groups = [{**group, "params": parameters}]
    return twin
