"""Portions of chunks: what moves together when updates are streamed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch_lms.chunk.layout import aligned

__all__ = ["Extent", "Portion", "Span", "groups_of", "portions_of"]


@dataclass(frozen=True, kw_only=True)
class Extent:
    """Where a tensor, or a rank's piece of it, lies in a chunk.

    Attributes:
        number: of the tensor.
        offset: of its first element in the chunk.
        numel: how many.
    """

    number: int
    offset: int
    numel: int


@dataclass(frozen=True, kw_only=True)
class Span:
    """What a portion holds of a tensor.

    Attributes:
        number: of the tensor.
        begin: of the first element in the tensor, or in the rank's piece of it.
        offset: of the first element in the portion.
        numel: how many.
        whole: whether there is no more of the tensor.
    """

    number: int
    begin: int
    offset: int
    numel: int
    whole: bool


@dataclass(frozen=True, kw_only=True)
class Portion:
    """Neighbouring elements of a chunk.

    Attributes:
        begin: of the first one in the chunk.
        numel: how many.
        spans: the tensors in it.
    """

    begin: int
    numel: int
    spans: tuple[Span, ...]


def portions_of(extents: Sequence[Extent], most_numel: int, *, cut: bool) -> list[Portion]:
    """Portions of one chunk, one behind the other: each holds neighbouring tensors, or a piece of one that is large.

    Args:
        extents: of the tensors, in order.
        most_numel: elements of a portion.
        cut: whether a larger tensor is cut; otherwise it is a portion.
    """
    found: list[Portion] = []
    together: list[Extent] = []
    for one in extents:
        if together and one.offset + one.numel - together[0].offset > most_numel:
            found.append(_of_several(together))
            together = []
        if cut and one.numel > most_numel:
            found += _pieces(one, most_numel)
        else:
            together.append(one)
    return [*found, _of_several(together)] if together else found


def groups_of(portions: Sequence[Portion]) -> list[list[int]]:
    """The tensors that are updated together: those of one portion, or the one that lies in several."""
    found: list[list[int]] = []
    for portion in portions:
        numbers = [span.number for span in portion.spans]
        if not found or found[-1] != numbers:
            found.append(numbers)
    return found


def _of_several(extents: Sequence[Extent]) -> Portion:
    begin, last = extents[0].offset, extents[-1]
    return Portion(
        begin=begin,
        numel=last.offset + last.numel - begin,
        spans=tuple(
            Span(number=one.number, begin=0, offset=one.offset - begin, numel=one.numel, whole=True) for one in extents
        ),
    )


def _pieces(extent: Extent, most_numel: int) -> Iterator[Portion]:
    """As equal as may be."""
    count = -(-extent.numel // most_numel)
    each = aligned(-(-extent.numel // count))
    for begin in range(0, extent.numel, each):
        numel = min(each, extent.numel - begin)
        span = Span(number=extent.number, begin=begin, offset=0, numel=numel, whole=False)
        yield Portion(begin=extent.offset + begin, numel=numel, spans=(span,))
