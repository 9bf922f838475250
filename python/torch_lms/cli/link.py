"""The rate of the link between host and device: plain asynchronous copies of pinned memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["LinkRate", "measure_link"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkRate:
    """Bytes a second, in each direction alone and the sum of both at once."""

    to_host: float
    to_device: float
    both: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Copy:
    to: torch.Tensor
    source: torch.Tensor
    stream: torch.cuda.Stream


def measure_link(nbytes: int = 1 << 30, rounds: int = 5, device: str = "cuda") -> LinkRate:
    """Measures with copies of ``nbytes`` in each direction; the median of ``rounds``."""
    host = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    out = _Copy(to=host[0], source=there[0], stream=streams[0])
    back = _Copy(to=there[1], source=host[1], stream=streams[1])
    _seconds([out, back], 2)
    return LinkRate(
        to_host=nbytes / _seconds([out], rounds),
        to_device=nbytes / _seconds([back], rounds),
        both=2 * nbytes / _seconds([out, back], rounds),
    )


def _seconds(copies: Sequence[_Copy], rounds: int) -> float:
    """Median time of copies that run side by side."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize(copies[0].stream.device)
        start = time.perf_counter()
        for copy in copies:
            with torch.cuda.stream(copy.stream):
                copy.to.copy_(copy.source, non_blocking=True)
        torch.cuda.synchronize(copies[0].stream.device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)
