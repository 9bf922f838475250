"""What stages may give up: segments, and where they lie."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    """

    names: tuple[str, ...]
    units: tuple[int, ...]
    again_us: float
    saved_bytes: float
    entering_bytes: float
    recomputable: bool


@dataclass(frozen=True, kw_only=True)
class Offers:
    """Segments as stages see them: a stage from cut a to cut b has those with ``a <= first`` and ``end <= b``.

    Attributes:
        segments: which.
        first: position of each one's first unit.
        end: position after its last.
    """

    segments: tuple[Segment, ...] = ()
    first: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    end: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def within(self, first: int, end: int) -> Offers:
        """Those that a stage from one cut to another has."""
        some = np.flatnonzero((self.first >= first) & (self.end <= end))
        segments = tuple(self.segments[number] for number in some)
        return Offers(segments=segments, first=self.first[some], end=self.end[some])


NO_OFFERS = Offers()
