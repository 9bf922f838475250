"""How fast copies between a device and its host are."""

from __future__ import annotations

import time
from functools import lru_cache

import torch

from torch_lms.plan.trace import Link

__all__ = ["measure_link"]

_BYTES = 32 << 20
_ROUNDS = 3


@lru_cache
def measure_link(device: str) -> Link:
    """The rates of one device's copies out and in, measured once in a process; takes milliseconds.

    Of main memory, whose copies the same processor makes, both are a plain copy's.
    """
    there = torch.empty(_BYTES, dtype=torch.uint8, device=device)
    host = torch.empty(_BYTES, dtype=torch.uint8, pin_memory=there.is_cuda)
    return Link(
        out_bytes_per_us=_BYTES / _copy_us(host, there),
        in_bytes_per_us=_BYTES / _copy_us(there, host),
        latency_us=10.0,
    )


def _copy_us(to: torch.Tensor, source: torch.Tensor) -> float:
    """The fastest of a few: whatever else runs makes them slower."""
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        to.copy_(source)
        if to.is_cuda or source.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1e6 * min(times)
