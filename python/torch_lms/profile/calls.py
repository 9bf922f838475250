"""What a call of PyTorch's Python interface does, by its name, and the node that stands for it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["BACKWARDS", "LEAVING", "READS", "has_tensors", "property_of", "target_of"]

# What gives Python a value of a tensor; all else that gives no tensor tells of its size, type or place.
READS = frozenset(
    [
        *("__bool__", "__int__", "__float__", "__complex__", "__index__", "__contains__", "item", "tolist"),
        *("equal", "allclose", "is_nonzero"),
    ]
)
LEAVING = frozenset(["numpy", "__array__", "__dlpack__", "data_ptr", "storage", "untyped_storage", "__set__"])
# A backward goes through the calls before it, whereas a graph's calls each stand alone.
BACKWARDS = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward, "backward")


def property_of(getter: Any) -> str:
    """The name of the property whose ``__get__`` is called."""
    return str(getter.__self__.__name__)


def target_of(function: Callable[..., Any], name: str) -> tuple[str, Any]:
    """Kind and target of the node for a call of a function of this name."""
    if name == "__get__":
        return "call_function", getattr
    if getattr(torch.Tensor, name, None) is function:
        as_operator = getattr(operator, name, None) if name.startswith("__") else None
        return ("call_function", as_operator) if as_operator is not None else ("call_method", name)
    return "call_function", function


def has_tensors(value: Any) -> bool:
    """Whether there are tensors in a value, at any depth of tuples, lists and dicts."""
    if isinstance(value, dict):
        return any(map(has_tensors, value.values()))
    return isinstance(value, torch.Tensor) or (isinstance(value, (tuple, list)) and any(map(has_tensors, value)))
