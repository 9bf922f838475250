"""Whether two values are the same: so alike that a program that is made for the one is right for the other."""

from __future__ import annotations

import dataclasses
import re
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["is_same", "without_addresses"]

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_NUMBERS = (bool, int, float, complex)  # bool first, which is a kind of int
_ARRAYS = (torch.Tensor, np.ndarray, np.generic)


def is_same(one: Any, other: Any) -> bool:
    """Whether two values have the same types and bits, at any depth.

    ``1``, ``1.0`` and ``True`` differ, for what they make of a tensor of whole numbers does; so do ``0.0`` and
    ``-0.0``. A number that is none is the same as itself. Tensors are the same on any device; those of the meta device
    have no values that could differ. Containers are compared by what they hold, all else by ``==``.
    """
    if one is other:
        return True
    for kind, compare in _KINDS:
        if isinstance(one, kind) and isinstance(other, kind):
            return bool(compare(one, other))
    if isinstance(one, _ARRAYS) or isinstance(other, _ARRAYS):  # one of one element is equal to a number
        return False
    if dataclasses.is_dataclass(one) and type(one) is type(other) and not isinstance(one, type):
        return all(
            is_same(*(getattr(value, field.name) for value in (one, other))) for field in dataclasses.fields(one)
        )
    try:
        return bool(one == other)
    except (RuntimeError, ValueError, TypeError):  # what is not simply equal or not
        return False


def without_addresses(value: Any) -> str:
    """What a value is called, whichever object of its kind it is."""
    return _ADDRESS.sub("", str(value))


def _same_tensors(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout):
        return False
    if one.is_meta or other.is_meta:
        return True
    with torch.no_grad():
        try:
            return torch.equal(*(_bits(tensor) for tensor in (one, other)))
        except (RuntimeError, NotImplementedError):  # of a class or a layout that has no bits to be seen
            return torch.equal(one, other)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.detach().cpu()
    dense = dense if dense.layout == torch.strided else dense.to_dense()
    if dense.is_complex():
        dense = torch.view_as_real(dense.resolve_conj())
    return dense.resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _same_arrays(one: Any, other: Any) -> Any:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    if one.dtype.hasobject:
        return is_same(one.tolist(), other.tolist())
    return one.tobytes() == other.tobytes()


def _same_numbers(one: Any, other: Any) -> bool:
    for kind in _NUMBERS:
        if isinstance(one, kind) or isinstance(other, kind):
            alike = isinstance(one, kind) and isinstance(other, kind)
            return alike and repr(kind(one)) == repr(kind(other))
    return False


def _same_items(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(is_same, one, other))


def _same_mappings(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
    ordered = isinstance(one, OrderedDict) and isinstance(other, OrderedDict)
    if len(one) != len(other) or (ordered and list(one) != list(other)):
        return False
    return all(name in other and is_same(value, other[name]) for name, value in one.items())


_KINDS: tuple[tuple[Any, Any], ...] = (
    (torch.Tensor, _same_tensors),
    (_NUMBERS, _same_numbers),
    (_ARRAYS[1:], _same_arrays),
    *((kind, _same_items) for kind in (list, tuple, deque)),
    (Mapping, _same_mappings),
)
