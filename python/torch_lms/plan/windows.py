"""How much of the link's time is still free beside compute, each way."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from torch_lms.plan.trace import Link

__all__ = ["LinkWindows"]

Floats = NDArray[np.float64]
Places = NDArray[np.int64]
_LOOKED_AT_ONCE = 128  # places, at first


class LinkWindows:
    """The free link time during each op; a swap takes the first that it can on its way out, the last on its way in.

    Args:
        durations_us: of the ops, with what is replayed before them.
        link: between device and host.
    """

    def __init__(self, durations_us: Floats, link: Link) -> None:
        self._link = link
        self._out_us = durations_us.astype(np.float64).copy()
        self._in_us = durations_us.astype(np.float64).copy()

    def exposed_out_us(self, size_bytes: Floats, first: Places, until: Places) -> Floats:
        """How much of each copy out does not fit into the free time of the places ``first`` to before ``until``."""
        copy_us = self._link.latency_us + size_bytes / self._link.out_bytes_per_us
        return _exposed(self._out_us, copy_us, first, until)

    def exposed_in_us(self, size_bytes: Floats, first: Places, until: Places) -> Floats:
        """The same of each copy in."""
        copy_us = self._link.latency_us + size_bytes / self._link.in_bytes_per_us
        return _exposed(self._in_us, copy_us, first, until)

    def take_out(self, size_bytes: float, first: int) -> None:
        """Uses up the earliest free time from a place on."""
        _take(self._out_us[first:], self._link.out_us(size_bytes))

    def take_in(self, size_bytes: float, before: int) -> None:
        """Uses up the latest free time before a place."""
        _take(self._in_us[:before][::-1], self._link.in_us(size_bytes))


def _exposed(free_us: Floats, copy_us: Floats, first: Places, until: Places) -> Floats:
    total = np.concatenate(([0.0], np.cumsum(free_us)))
    found: Floats = np.maximum(copy_us - np.maximum(total[np.maximum(until, first)] - total[first], 0.0), 0.0)
    return found


def _take(free_us: Floats, wanted_us: float) -> None:
    """Takes time from the front of a view, as far as there is any; most often there is enough near by."""
    first, count = 0, _LOOKED_AT_ONCE
    while first < len(free_us):
        part = free_us[first : first + count]
        total = np.cumsum(part)
        if total[-1] >= wanted_us:
            whole = int(np.searchsorted(total, wanted_us))
            part[whole] = total[whole] - wanted_us
            part[:whole] = 0.0
            return
        wanted_us -= float(total[-1])
        part[:] = 0.0
        first, count = first + count, 4 * count
