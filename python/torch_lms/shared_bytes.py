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
    """Their numbers, the lower one first. Where more than two have a byte, each is paired with the first of them.

    Args:
        tensors: each of which is there once, and whose bytes are not read; those on the meta device share what they
            would on another.
    """
    in_storage: dict[int, list[int]] = defaultdict(list)
    for number, tensor in enumerate(tensors):
        has_bytes = tensor.layout is torch.strided and not is_lazy(tensor) and tensor.numel() > 0
        if has_bytes:
            in_storage[storage_key(tensor)].append(number)
    for beside in in_storage.values():
        for meeting in _that_meet({number: _span(tensors[number]) for number in beside}):
            yield from _pairs_of([(number, tensors[number]) for number in meeting])


def _that_meet(spans: dict[int, range]) -> Iterator[list[int]]:
    """Those that lie within each other's first and last bytes; a storage may hold thousands that do not."""
    meeting: list[int] = []
    end = 0
    for number in sorted(spans, key=lambda number: spans[number].start):
        if spans[number].start >= end and meeting:
            yield meeting
            meeting = []
        meeting.append(number)
        end = max(end, spans[number].stop)
    yield meeting


def _pairs_of(meeting: Sequence[tuple[int, torch.Tensor]]) -> Iterator[tuple[int, int]]:
    """Each place belongs to the first of those that have it, and who comes later finds its owner there."""
    if len(meeting) < 2:
        return
    unit = math.gcd(*(one.element_size() for _, one in meeting))
    begin = min(_span(one).start for _, one in meeting)
    end = max(_span(one).stop for _, one in meeting)
    owners = torch.full(((end - begin) // unit,), -1, dtype=torch.int32, device="cpu")
    places = torch.arange(len(owners), device="cpu")
    for number, one in sorted(meeting, key=lambda numbered: numbered[0]):
        each = one.element_size() // unit
        strides = (*(stride * each for stride in one.stride()), 1)
        where = (*one.shape, each), strides, (_span(one).start - begin) // unit
        own = owners.as_strided(*where)
        yield from ((other, number) for other in own[own >= 0].unique().tolist())
        owners[places.as_strided(*where)[own < 0]] = number


def _span(one: torch.Tensor) -> range:
    """From a tensor's first byte in its storage to its last; not all that is between need be its own."""
    steps = sum((length - 1) * step for length, step in zip(one.shape, one.stride(), strict=True))
    begin, width = int(one.storage_offset()), one.element_size()
    return range(begin * width, (begin + steps + 1) * width)
