"""How values cross a border between stages: as contiguous floating tensors, whatever they are.

Transports send contiguous tensors, and torch.distributed.pipelining asks a gradient of each. So a value is *packed*
into carriers and unpacked behind the border:

    floating tensor       itself, in the order of its strides; behind the border it has the same strides again, so that
                          kernels choose the same way and results stay bit-equal; a conjugated or negated view is not
                          one there
    integer, bool tensor  its bits as a floating tensor of the same width; one byte wide: its values as float16
    int, float, bool      is no carrier: goes from program to program (``host_values``)
    anything else         is not sent: it must be what it was in the first run; a device becomes the stage's own

What a value is made of is its *template*: nested tuples, lists and dicts of slots. The first run finds the templates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_lms.errors import PipelineError
from torch_lms.pipeline.transfers import sendable

__all__ = ["Number", "NumberSlot", "TensorSlot", "carrier_metas", "describe", "has_numbers", "pack", "unpack"]

Number = int | float | bool

_BITS = {8: torch.float64, 4: torch.float32, 2: torch.float16}
_MOST_GAPS = 4  # a tensor spread over more than this many times its own size is sent dense


@dataclass(frozen=True)
class TensorSlot:
    """A tensor of one shape, type and layout."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool

    @property
    def order(self) -> tuple[int, ...]:
        """The dimensions from the largest stride to the smallest."""
        return tuple(sorted(range(len(self.shape)), key=lambda dim: (-self.stride[dim], dim)))

    @property
    def gaps(self) -> bool:
        """Whether the strides leave room between elements that is worth keeping."""
        count = 1
        for size in self.shape:
            count *= size
        span = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=False))
        overlaps = any(stride == 0 and size > 1 for size, stride in zip(self.shape, self.stride, strict=False))
        return not overlaps and count < span <= _MOST_GAPS * count


@dataclass(frozen=True)
class NumberSlot:
    """A Python number; the value is that of the first run."""

    value: Number


@dataclass(frozen=True)
class ConstantSlot:
    """Something else, which has to stay what it was."""

    value: Any


@dataclass(frozen=True)
class SequenceSlot:
    """A tuple, list, torch.Size or named tuple."""

    kind: type
    items: tuple[Any, ...]

    def make(self, items: Sequence[Any]) -> Any:
        """The sequence with these items."""
        return self.kind(*items) if hasattr(self.kind, "_fields") else self.kind(items)


@dataclass(frozen=True)
class MappingSlot:
    """A dict."""

    keys: tuple[Any, ...]
    items: tuple[Any, ...]


def describe(value: Any) -> Any:
    """The template of a value."""
    if isinstance(value, torch.Tensor):
        return TensorSlot(tuple(value.shape), tuple(value.stride()), value.dtype, value.requires_grad)
    if isinstance(value, (bool, int, float)):
        return NumberSlot(value)
    if isinstance(value, (tuple, list)):
        kind = torch.Size if isinstance(value, torch.Size) else type(value)
        return SequenceSlot(kind, tuple(describe(item) for item in value))
    if isinstance(value, dict):
        return MappingSlot(tuple(value), tuple(describe(item) for item in value.values()))
    return ConstantSlot(value)


def _leaves(template: Any) -> Iterator[Any]:
    if isinstance(template, (SequenceSlot, MappingSlot)):
        for item in template.items:
            yield from _leaves(item)
    else:
        yield template


def carrier_metas(template: Any) -> list[tuple[tuple[int, ...], torch.dtype, bool]]:
    """Shape, type and whether it has a gradient, of each carrier."""
    metas = [
        (tuple(slot.shape[dim] for dim in slot.order), _carrier(slot.dtype), slot.differentiable)
        for slot in _leaves(template)
        if isinstance(slot, TensorSlot)
    ]
    return metas or [((1,), torch.float64, False)]  # something always crosses, so that the next stage knows when to run


def has_numbers(template: Any) -> bool:
    """Whether there are numbers among a value."""
    return any(isinstance(slot, NumberSlot) for slot in _leaves(template))


def _carrier(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_floating_point or dtype.is_complex:
        return dtype
    size = torch.empty(0, dtype=dtype).element_size()
    return _BITS.get(size, torch.float16)


def pack(template: Any, value: Any, device: torch.device, where: str) -> tuple[list[torch.Tensor], list[Number]]:
    """The carriers of a value, and its numbers.

    Raises:
        PipelineError: if the value is not of the template.
    """
    carriers: list[torch.Tensor] = []
    numbers: list[Number] = []
    _pack(template, value, carriers, numbers, where)
    return carriers or [torch.zeros(1, dtype=torch.float64, device=device)], numbers


def _pack(template: Any, value: Any, carriers: list[torch.Tensor], numbers: list[Number], where: str) -> None:
    found = describe(value)
    if isinstance(template, (SequenceSlot, MappingSlot)):
        same = type(found) is type(template) and len(found.items) == len(template.items)
        items: Any = value.values() if isinstance(value, dict) else value
        if same and (isinstance(template, SequenceSlot) or found.keys == template.keys):
            for slot, item in zip(template.items, items, strict=False):
                _pack(slot, item, carriers, numbers, where)
            return
    elif isinstance(template, NumberSlot) and type(value) is type(template.value):
        numbers.append(value)
        return
    elif isinstance(template, TensorSlot) and isinstance(found, TensorSlot):
        if (found.shape, found.dtype) == (template.shape, template.dtype):
            carriers.append(_to_carrier(template, value))
            return
    elif isinstance(template, ConstantSlot) and (isinstance(value, torch.device) or bool(value == template.value)):
        return
    raise PipelineError(
        f"expected {template} from {where}, as in the first step with arguments of these shapes, found {found}; have "
        "shapes, types and constants depend on nothing but shapes of arguments, or make a new Pipeline"
    )


def _to_carrier(slot: TensorSlot, value: torch.Tensor) -> torch.Tensor:
    dense = sendable(value.permute(slot.order))
    if min(dense.shape, default=2) < 2 and dense.stride() != torch.empty(dense.shape, device="meta").stride():
        dense = dense.flatten().view(dense.shape)  # dimensions of size 1 have any stride, and PyTorch compares them
    carrier = _carrier(slot.dtype)
    if carrier == slot.dtype:
        return dense if slot.differentiable else dense.detach()
    return dense.to(carrier) if dense.element_size() == 1 else dense.view(carrier)


def unpack(template: Any, carriers: Sequence[torch.Tensor], numbers: Sequence[Number], device: torch.device) -> Any:
    """The value that `pack` packed."""
    return _unpack(template, iter(carriers), iter(numbers), device)


def _unpack(slot: Any, tensors: Iterator[torch.Tensor], numbers: Iterator[Number], device: torch.device) -> Any:
    """No function within `unpack`: one that calls itself would hold the carriers until the next collection."""
    if isinstance(slot, TensorSlot):
        return _from_carrier(slot, next(tensors))
    if isinstance(slot, NumberSlot):
        return next(numbers)
    if isinstance(slot, SequenceSlot):
        return slot.make([_unpack(item, tensors, numbers, device) for item in slot.items])
    if isinstance(slot, MappingSlot):
        return {key: _unpack(item, tensors, numbers, device) for key, item in zip(slot.keys, slot.items, strict=True)}
    return device if isinstance(slot.value, torch.device) else slot.value


def _from_carrier(slot: TensorSlot, carrier: torch.Tensor) -> torch.Tensor:
    if _carrier(slot.dtype) != slot.dtype:
        one_byte = torch.empty(0, dtype=slot.dtype).element_size() == 1
        carrier = carrier.to(slot.dtype) if one_byte else carrier.view(slot.dtype)
    inverse = sorted(range(len(slot.order)), key=slot.order.__getitem__)
    value = carrier.permute(inverse)
    if slot.gaps:
        spread = torch.empty_strided(slot.shape, slot.stride, dtype=slot.dtype, device=carrier.device)
        value = spread.copy_(value)
    return value
