"""A sample of a model's arguments: which of them are tensors, and which are constants of the graph."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torch_lms._torch_compat import tree_flatten, tree_map, tree_unflatten
from torch_lms.errors import ProfileError
from torch_lms.profile.sameness import is_same

__all__ = ["Sample", "bind_sample", "check_model"]


@dataclass(frozen=True)
class Sample:
    """What a model is called with.

    A tensor inside a list, tuple or dict is an argument of the graph of its own: ``xs=[a, b]`` gives ``xs_0`` and
    ``xs_1``. All other values are constants, and the graph is one for these values.

    Attributes:
        args: by place.
        kwargs: by name.
        names: of the tensors, in order; the graph's placeholders.
        tensors: one for each name.
        constants: the arguments that have no tensor in them.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    constants: Mapping[str, Any] = field(default_factory=dict)

    def call(self, function: Callable[..., Any], tensors: Sequence[Any]) -> Any:
        """Calls a function as the sample says, with other values in place of the tensors."""
        left = iter(tensors)
        leaves, spec = tree_flatten((list(self.args), dict(self.kwargs)))
        args, kwargs = tree_unflatten([next(left) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)
        return function(*args, **kwargs)

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The graph's arguments from those of the model.

        Raises:
            ProfileError: if they differ from the sample in more than the tensors.
        """
        own, own_spec = tree_flatten((list(self.args), dict(self.kwargs)))
        leaves, spec = tree_flatten((list(args), {name: kwargs[name] for name in self.kwargs if name in kwargs}))
        if spec != own_spec or set(kwargs) != set(self.kwargs):
            raise ProfileError(
                f"expected arguments of the sample's structure ({self.describe()}), found others; trace the model again"
            )
        for mine, given in zip(own, leaves, strict=True):
            if not isinstance(mine, torch.Tensor) and not is_same(mine, given):
                raise ProfileError(
                    f"expected {mine!r}, a constant of the graph, found {given!r}; trace the model again for this value"
                )
        return tuple(leaf for mine, leaf in zip(own, leaves, strict=True) if isinstance(mine, torch.Tensor))

    def leaves(self) -> tuple[torch.Tensor, ...]:
        """Its tensors, apart from the graph that they may be part of."""
        return tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in self.tensors)

    def to(self, device: torch.device) -> Sample:
        """The same sample with its tensors on another device."""
        return self.mapped(lambda tensor: tensor.to(device))

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Sample:
        """The same sample with other tensors in place of its own."""
        made = {id(tensor): change(tensor) for tensor in self.tensors}

        def swap(value: Any) -> Any:
            return made[id(value)] if isinstance(value, torch.Tensor) else value

        args, kwargs = tree_map(swap, (list(self.args), dict(self.kwargs)))
        return Sample(tuple(args), kwargs, self.names, tuple(map(swap, self.tensors)), self.constants)

    def describe(self) -> str:
        """Names, types and shapes, for messages."""
        shapes = [
            f"{name}: {str(tensor.dtype).split('.')[-1]}{list(tensor.shape)}"
            for name, tensor in zip(self.names, self.tensors, strict=True)
        ]
        return ", ".join([*shapes, *(f"{name}={value!r}" for name, value in self.constants.items())])


def check_model(model: Any) -> None:
    """Refuses what is no model whose code can be run and traced.

    Raises:
        ProfileError: for what is no module, one of TorchScript, and one whose parameters have no sizes as yet.
    """
    if not isinstance(model, nn.Module):
        raise ProfileError(f"expected an nn.Module, found {type(model).__name__}; wrap functions in a module")
    if isinstance(model, torch.jit.ScriptModule):
        raise ProfileError(
            f"expected a module of Python code, found {type(model).__name__}, which has none; pass the module that "
            "torch.jit was given"
        )
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    lazy = next((name for name, tensor in named if is_lazy(tensor)), None)
    if lazy is not None:
        raise ProfileError(
            f"expected parameters and buffers with sizes, found {lazy!r} of {type(model).__name__} without; call the "
            "model once before"
        )


def bind_sample(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sample:
    """Names each argument as the model's ``forward`` does.

    Raises:
        ProfileError: if ``forward`` does not take these arguments, or none of them has a tensor.
    """
    names: list[str] = []
    tensors: list[torch.Tensor] = []
    constants: dict[str, Any] = {}
    for name, value in _named(model, args, kwargs):
        leaves = tree_flatten(value)[0]
        found = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not found:
            constants[name] = value
        for index, tensor in enumerate(found):
            names.append(_unique(name if isinstance(value, torch.Tensor) else f"{name}_{index}", names))
            tensors.append(tensor)
    if not tensors:
        raise ProfileError(
            f"expected sample arguments with a tensor among them, found {constants or 'none'}; "
            f"pass what {type(model).__name__}.forward takes"
        )
    return Sample(tuple(args), dict(kwargs), tuple(names), tuple(tensors), constants)


def _named(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Each argument that is given with its name; those by place first, then as in the signature."""
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ProfileError(
            f"expected the arguments of {type(model).__name__}.forward{signature}, found others: {error}; "
            "pass the sample as you would call the model"
        ) from error
    named: list[tuple[str, Any]] = []
    given_by_place = []
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            given_by_place += [(f"{name}_{index}", item) for index, item in enumerate(value)]
        elif kind is not inspect.Parameter.VAR_KEYWORD and name not in kwargs:
            given_by_place.append((name, value))
    named += given_by_place
    # Constants and tensors meet the graph in the order in which `Sample.call` flattens them.
    named += list(kwargs.items())
    return named


def _unique(name: str, taken: Sequence[str]) -> str:
    name = re.sub(r"\W", "_", name)
    return name if name not in taken else _unique(f"{name}_", taken)
