"""What stages may give up: segments, and where they lie.

Note [Runs]: what crosses a border between two segments that are computed again stays, so that larger segments leave
less of each microbatch, and have more at once while they are computed again. Which size is best depends on how many
microbatches are in flight, so that some are tried: runs of so many parts, one after the other from the first part of a
stage on, and what is left at its end part by part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["NO_OFFERS", "Offers", "Segment"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Nodes that follow each other.

    Attributes:
        names: of the nodes.
        units: that they are of.
        again_us: that it takes to be computed again, on a device of speed 1.
        saved_bytes: that are given up for each microbatch in flight.
        entering_bytes: that must be held to compute it again, and are not held else.
        recomputable: whether it finds the same again.
        part: number of its first part among those that can be given up.
        parts: how many it has.
    """

    names: tuple[str, ...]
    units: tuple[int, ...]
    again_us: float
    saved_bytes: float
    entering_bytes: float
    recomputable: bool
    part: int = 0
    parts: int = 1


@dataclass(frozen=True, kw_only=True)
class Offers:
    """Segments as stages see them: a stage from cut a to cut b has those with ``a <= first`` and ``end <= b``.

    Attributes:
        segments: which; with runs there are single parts.
        first: position of each one's first unit.
        end: position after its last.
        length: parts in a run; see Note [Runs].
    """

    segments: tuple[Segment, ...] = ()
    first: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    end: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    length: int = 1

    def of(self, first: Any, end: Any) -> list[Any]:
        """For each segment whether a stage has it, or which stages of an array do."""
        inside = [(first <= one) & (end >= other) for one, other in zip(self.first, self.end, strict=True)]
        return inside if self.length == 1 else _in_turn(self.segments, inside, self.length)

    def within(self, first: int, end: int) -> Offers:
        """Those that a stage from one cut to another has, one after the other."""
        some = np.flatnonzero(self.of(first, end))
        segments = tuple(self.segments[number] for number in some)
        return Offers(segments=segments, first=self.first[some], end=self.end[some])


def _in_turn(segments: Sequence[Segment], inside: Sequence[Any], length: int) -> list[Any]:
    """Which runs of parts a stage has, and which single parts; see Note [Runs].

    Args:
        segments: all that it may have, in the order of their first parts.
        inside: whether they lie in it.
        length: of a run.
    """
    begin: Any = -1
    end: Any = -1  # of the parts that follow each other from the first on
    for one, within in zip(segments, inside, strict=True):
        if one.parts == 1:
            end = np.where(within & ((begin < 0) | (end == one.part)), one.part + 1, end)
            begin = np.where(within & (begin < 0), one.part, begin)
    place = begin % length
    last = end - (end - begin) % length  # the end of the last run
    return [
        within & (place == one.part % length) & (one.part < last)
        if one.parts > 1
        else within & (one.part >= last) & (one.part < end)
        for one, within in zip(segments, inside, strict=True)
    ]


NO_OFFERS = Offers()
