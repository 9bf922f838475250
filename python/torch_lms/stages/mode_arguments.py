"""How a call of a function of PyTorch is told whether it is in training or in evaluation."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

__all__ = [
    "FLAG",
    "RATE",
    "STATISTICS",
    "argument_names",
    "given_to",
    "knows_mode",
    "mode_name",
    "with_argument",
]

FLAG = "training"
_FLAGS = (FLAG, "train", "use_input_stats")
RATE = "dropout_p"
STATISTICS = "running_mean"
# Arguments of builtin functions, which have no signature.
_BUILTIN = {
    **{
        name: ("input", "p", "train")
        for kind in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
        for name in (kind, f"{kind}_")
    },
    "batch_norm": ("input", "weight", "bias", STATISTICS, "running_var", FLAG),
    "instance_norm": ("input", "weight", "bias", STATISTICS, "running_var", "use_input_stats"),
    "rrelu": ("input", "lower", "upper", FLAG),
    "scaled_dot_product_attention": ("query", "key", "value", "attn_mask", RATE),
}


@cache
def argument_names(function: Any) -> tuple[str, ...]:
    """What the arguments of a function are called; none where that is not known."""
    if isinstance(function, type):
        return ()
    schema = getattr(function, "_schema", None)
    if schema is not None:
        return tuple(argument.name for argument in schema.arguments)
    known = _BUILTIN.get(getattr(function, "__name__", ""), ())
    try:
        return tuple(inspect.signature(function).parameters) if inspect.isroutine(function) else known
    except (TypeError, ValueError):
        return known


def mode_name(function: Any) -> str | None:
    """The argument that tells a function its mode; of attention that is how much it drops."""
    names = argument_names(function)
    return next((name for name in (*_FLAGS, RATE) if name in names), None)


def given_to(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    """What an argument is given; None where that is its default, but of operators, whose graphs leave defaults out."""
    place = argument_names(function).index(name) if name in argument_names(function) else len(args)
    if place < len(args):
        return args[place]
    schema = getattr(function, "_schema", None)
    return kwargs.get(name, None if schema is None else schema.arguments[place].default_value)


def with_argument(
    function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str, value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with another value of one that is given."""
    place = argument_names(function).index(name)
    if place < len(args):
        return (*args[:place], value, *args[place + 1 :]), dict(kwargs)
    return args, {**kwargs, name: value}


def knows_mode(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call says a mode: without running statistics, a norm uses the batch's own in each."""
    name = mode_name(function)
    if name is None or given_to(function, args, kwargs, name) is None:
        return False
    return STATISTICS not in argument_names(function) or given_to(function, args, kwargs, STATISTICS) is not None
