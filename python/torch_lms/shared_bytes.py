"""Tensors that have bytes in common, though they are not the same one.

Tensors of one storage need not have any: cuDNN's recurrent modules keep all their parameters in one, and columns of a
matrix lie in turns. Where one tensor begins before another ends, the place of each element decides.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch.nn.parameter import is_lazy

from torch_lms._torch_compat import storage_key

__all__ = ["pairs_that_share"]


def pairs_that_share(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Their numbers, the lower one first. No bytes are read.

    Args:
        tensors: each of which is there once; those on the meta device share what they would on another.
    """
    in_storage: dict[int, list[int]] = defaultdict(list)
    for number, tensor in enumerate(tensors):
        has_bytes = tensor.layout is torch.strided and not is_lazy(tensor) and tensor.numel() > 0
        if has_bytes:
            in_storage[storage_key(tensor)].append(number)
    for beside in in_storage.values():
        for one, other in _that_meet({number: _span(tensors[number]) for number in beside}):
            if _overlap(tensors[one], tensors[other]):
                yield (one, other) if one < other else (other, one)


def _that_meet(spans: dict[int, range]) -> Iterator[tuple[int, int]]:
    """A storage may hold thousands that do not."""
    before: list[int] = []
    for number in sorted(spans, key=lambda number: spans[number].start):
        before = [other for other in before if spans[other].stop > spans[number].start]
        yield from ((other, number) for other in before)
        before.append(number)


def _span(one: torch.Tensor) -> range:
    """From a tensor's first byte in its storage to its last; not all that is between need be its own."""
    steps = sum((length - 1) * step for length, step in zip(one.shape, one.stride(), strict=True))
    begin, width = int(one.storage_offset()), one.element_size()
    return range(begin * width, (begin + steps + 1) * width)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage, whose spans meet, have a byte in common."""
    if one.is_contiguous() and other.is_contiguous():
        return True
    unit = math.gcd(one.element_size(), other.element_size())
    begin = min(_span(one).start, _span(other).start)
    marks = torch.zeros((max(_span(one).stop, _span(other).stop) - begin) // unit, dtype=torch.bool, device="cpu")
    _marks_of(one, marks, begin, unit).fill_(True)
    return bool(_marks_of(other, marks, begin, unit).any())


def _marks_of(one: torch.Tensor, marks: torch.Tensor, begin: int, unit: int) -> torch.Tensor:
    """Of marks for the bytes of a storage from some place on, a tensor's own."""
    each = one.element_size() // unit
    strides = (*(stride * each for stride in one.stride()), 1)
    return marks.as_strided((*one.shape, each), strides, (_span(one).start - begin) // unit)
