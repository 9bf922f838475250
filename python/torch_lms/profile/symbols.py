"""What stands for a tensor while a model is traced with torch.fx: its proxies, and what they lack.

Note [In place]: to a proxy of torch.fx, ``y += 1`` is ``y = y + 1``: another name of the tensor would not see the
change. And torch.fx writes a node of ``operator.iadd`` as ``y += 1``, which is wrong for numbers, such as sizes, where
another name must not see it. So such a line is a call of a function here, which does what Python does.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.proxy import Attribute

__all__ = ["IN_PLACE", "Known", "Symbol", "is_tensor"]

_FIXED = frozenset(["shape", "size", "dim", "ndim", "numel", "nelement"])
_FIXED_OF_BUFFERS = frozenset(
    [
        *("device", "dtype", "layout", "get_device", "element_size", "itemsize", "nbytes", "stride", "is_contiguous"),
        *("is_complex", "is_cpu", "is_cuda", "is_floating_point", "is_meta", "is_quantized", "is_sparse"),
        *("names", "ndimension", "requires_grad"),
    ]
)
_TENSORS = frozenset(["T", "H", "mT", "mH", "data", "real", "imag"])
_OPERATORS = (
    "add",
    "sub",
    "mul",
    "matmul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
)


def _function_of(name: str) -> Callable[[Any, Any], Any]:
    run: Callable[[Any, Any], Any] = getattr(operator, f"i{name}")

    def in_place(value: Any, other: Any) -> Any:
        return run(value, other)

    in_place.__name__ = in_place.__qualname__ = f"i{name}_"
    in_place.__doc__ = f"See Note [In place]: what ``operator.i{name}`` does."
    return in_place


# By the method that Python calls; each is an attribute of this file, for code that is pickled.
IN_PLACE = {f"__i{name}__": _function_of(name) for name in _OPERATORS}
globals().update({function.__name__: function for function in IN_PLACE.values()})


def _method_of(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        made = self.tracer.create_proxy("call_function", function, (self, other), {})
        return self if isinstance(self, Known) else made

    return method


class _Changing:
    """A proxy that knows what works in place, and has attributes that do."""

    def __getattr__(self, name: str) -> Any:
        return _SymbolAttribute(self, name)  # type: ignore[arg-type]


for _name, _function in IN_PLACE.items():
    setattr(_Changing, _name, _method_of(_function))


class _SymbolAttribute(_Changing, Attribute):
    """An attribute or a method of a symbol."""


class Symbol(_Changing, fx.Proxy):
    """Stands for a tensor, or for what was made of tensors."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("tracer", "node", "value"):
            raise TypeError(f"expected code that only reads attributes of tensors, found one that sets {name!r}")
        object.__setattr__(self, name, value)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})


class Known(Symbol):
    """Stands for a parameter or a buffer: its size is known, and that of buffers also their type and place."""

    def __init__(self, node: fx.Node, tracer: fx.Tracer, value: torch.Tensor) -> None:
        super().__init__(node, tracer)
        self.value = value

    def __getattr__(self, name: str) -> Any:
        buffers_own = name in _FIXED_OF_BUFFERS and not isinstance(self.value, torch.nn.Parameter)
        return getattr(self.value, name) if name in _FIXED or buffers_own else super().__getattr__(name)

    def __len__(self) -> int:
        return len(self.value)

    def __iter__(self) -> Iterator[Any]:
        return (operator.getitem(self, index) for index in range(len(self)))


def is_tensor(value: Any) -> bool:
    """Whether a value stands for a tensor, as far as can be told; `Attribute` is not asked, for it would answer."""
    kind = type(value)
    return kind in (Symbol, Known) or (kind is _SymbolAttribute and value.attr in _TENSORS)
