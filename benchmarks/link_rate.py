"""The rate of the link between host and device: plain asynchronous copies of pinned memory."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

__all__ = ["LinkRate", "measure_link"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkRate:
    """Bytes a second, in each direction alone and the sum of both at once."""

    to_host: float
    to_device: float
    both: float


def _seconds(copy: list[tuple[torch.Tensor, torch.Tensor, torch.cuda.Stream]], rounds: int) -> float:
    """Median time for (to, from, stream) copies that run side by side."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for to, source, stream in copy:
            with torch.cuda.stream(stream):
                to.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure_link(nbytes: int = 1 << 30, rounds: int = 5) -> LinkRate:
    """Measures with copies of ``nbytes`` in each direction; the median of ``rounds``."""
    host = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    out = (host[0], device[0], streams[0])
    back = (device[1], host[1], streams[1])
    _seconds([out, back], 2)
    return LinkRate(
        to_host=nbytes / _seconds([out], rounds),
        to_device=nbytes / _seconds([back], rounds),
        both=2 * nbytes / _seconds([out, back], rounds),
    )
