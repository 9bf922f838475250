"""The largest size that fits, found by trying."""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = ["search"]

MOST = 1 << 20
PRECISION = 1.1  # the largest that fits is known to this factor


def search(fits: Callable[[int], bool], *, start: int, grain: int) -> int:
    """The largest multiple of a grain that fits, to a precision of 10 %; 0 if none does.

    Args:
        fits: whether a size does.
        start: what is tried first.
        grain: of sizes.
    """
    size = max(grain, start // grain * grain)
    good, bad = (size, 0) if fits(size) else (0, size)
    factor = PRECISION  # a start is mostly near the answer, and each try takes long
    while not bad and good < MOST:
        size = max(good + grain, math.floor(good * factor / grain) * grain)
        good, bad = (size, 0) if fits(size) else (good, size)
        factor **= 2
    while not good and bad > grain:
        size = max(grain, bad // 2 // grain * grain)
        good, bad = (size, bad) if fits(size) else (0, size)
    while good and bad - good > grain and bad > good * PRECISION:
        size = (good + bad) // 2 // grain * grain
        size = size if size > good else good + grain
        good, bad = (size, bad) if fits(size) else (good, size)
    return good
