"""How fast copies between devices are: measured, as a latency and a rate for each way."""

from __future__ import annotations

import statistics
import time

import torch

from torch_lms.profile.document import LinkProfile

__all__ = ["measure_link", "measure_links"]

_SMALL_BYTES = 4 << 10
_LARGE_BYTES = 64 << 20
_ROUNDS = 5


def measure_links(device: torch.device) -> tuple[LinkProfile, ...]:
    """All ways between the host and the CUDA devices of this machine, and between each two of these.

    Args:
        device: the profiled one; without CUDA there is nothing to copy between, and no link.
    """
    if device.type != "cuda":
        return ()
    names = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    return tuple(measure_link(source, target) for source in names for target in names if source != target)


def measure_link(source: str, target: str) -> LinkProfile:
    """Measures copies of two sizes; host memory is pinned."""
    small_us, large_us = (_copy_us(source, target, nbytes) for nbytes in (_SMALL_BYTES, _LARGE_BYTES))
    bytes_per_us = (_LARGE_BYTES - _SMALL_BYTES) / max(large_us - small_us, 1e-3)
    latency_us = max(small_us - _SMALL_BYTES / bytes_per_us, 0.0)
    return LinkProfile(source=source, target=target, bytes_per_us=bytes_per_us, latency_us=latency_us)


def _copy_us(source: str, target: str, nbytes: int) -> float:
    """Median time of a copy, the call included."""
    from_, to = _place(source, nbytes), _place(target, nbytes)
    cuda = [torch.device(name) for name in (source, target) if name.startswith("cuda")]
    times_us = []
    for round_ in range(_ROUNDS + 1):
        for device in cuda:
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        to.copy_(from_, non_blocking=True)
        for device in cuda:
            torch.cuda.synchronize(device)
        if round_:  # the first one sets things up
            times_us.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times_us)


def _place(name: str, nbytes: int) -> torch.Tensor:
    if name == "cpu":
        return torch.zeros(nbytes, dtype=torch.uint8, device=name, pin_memory=torch.cuda.is_available())
    return torch.zeros(nbytes, dtype=torch.uint8, device=name)
