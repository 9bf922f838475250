"""How fast devices are beside each other: what the same work takes on each, as `work_us` measures it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection, Mapping
from typing import Any

import torch

__all__ = ["work_us"]

_SIZE = 8192  # of square matrices, whose product has a device work at its power's limit
_BURST_S, _BURSTS = 0.05, 24  # each about what a stage of a large model takes for a microbatch


def work_us(devices: Collection[torch.device], rest_share: float = 0.0) -> Mapping[torch.device, float]:
    """Time of one product of matrices on each of several CUDA devices, which all work at the same time.

    Takes about 1.2 s and the rests, and 0.4 GiB of each device while it runs.

    Args:
        devices: with their numbers.
        rest_share: of the time, how long they rest in between, as devices of a pipeline do.

    Raises:
        RuntimeError: if a device has no memory for it.
    """
    work = [_Products(device) for device in devices]
    for one in work:
        one.burst(1)  # sets things up
    times_us: dict[torch.device, list[float]] = {one.device: one.burst(1) for one in work}
    count = max(1, round(_BURST_S * 1e6 / min((us for found in times_us.values() for us in found), default=1.0)))
    for _ in range(_BURSTS):
        began = time.perf_counter()
        for one in work:
            one.start(count)
        for one in work:
            times_us[one.device] += one.wait()
        time.sleep((time.perf_counter() - began) * rest_share / (1 - rest_share))
    del work
    torch.cuda.empty_cache()  # NCCL has its memory beside it
    return {device: statistics.median(found[len(found) // 2 :]) for device, found in times_us.items()}


class _Products:
    """Products of random matrices on a device: with equal values it would need less power."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        generator = torch.Generator(device).manual_seed(0)  # the program's own stays as it is
        self._given = torch.randn(2, _SIZE, _SIZE, device=device, dtype=torch.float16, generator=generator)
        self._result = torch.empty_like(self._given[0])
        self._count = 0
        with torch.cuda.device(device):
            self._marks: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def start(self, count: int) -> None:
        """Begins so many products."""
        self._count = count
        with torch.cuda.device(self.device):
            self._marks[0].record()
            for _ in range(count):
                torch.mm(*self._given, out=self._result)
            self._marks[1].record()

    def wait(self) -> list[float]:
        """What one of them took."""
        self._marks[1].synchronize()
        return [1e3 * self._marks[0].elapsed_time(self._marks[1]) / self._count]

    def burst(self, count: int) -> list[float]:
        """Both."""
        self.start(count)
        return self.wait()
