"""How fast copies between a device and its host are."""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import lru_cache

import torch

from torch_lms.plan.trace import Link

__all__ = ["copy_seconds", "measure_link", "wait_for_device"]

_BYTES = 32 << 20


@lru_cache
def measure_link(device: str) -> Link:
    """The rates of one device's copies out and in, measured once in a process; takes milliseconds.

    Of main memory, whose copies the same processor makes, both are a plain copy's; neither is slower beside the other.
    """
    there, there_too = (torch.empty(_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    pinned = there.is_cuda
    # On the CPU, whatever the default device is.
    host, host_too = (torch.empty(_BYTES, dtype=torch.uint8, device="cpu", pin_memory=pinned) for _ in range(2))
    out_s, in_s = copy_seconds((host, there)), copy_seconds((there, host))
    both_s = copy_seconds((host, there), (there_too, host_too)) if pinned else 0.0
    return Link(
        out_bytes_per_us=_BYTES / (1e6 * out_s),
        in_bytes_per_us=_BYTES / (1e6 * in_s),
        latency_us=10.0,
        share_beside=min(1.0, max(out_s, in_s) / both_s) if pinned else 1.0,
    )


def copy_seconds(*copies: tuple[torch.Tensor, torch.Tensor], rounds: int = 3) -> float:
    """The time of copies, each to its first tensor from its second, that run side by side.

    Args:
        copies: of one device.
        rounds: of which the fastest counts: whatever else runs makes them slower.
    """
    device = next((tensor.device for copy in copies for tensor in copy if tensor.is_cuda), None)
    streams = [nullcontext() if device is None else torch.cuda.stream(torch.cuda.Stream(device)) for _ in copies]
    times = []
    for _ in range(rounds):
        wait_for_device(device)
        start = time.perf_counter()
        for (to, source), stream in zip(copies, streams, strict=True):
            with stream:
                to.copy_(source, non_blocking=True)
        wait_for_device(device)
        times.append(time.perf_counter() - start)
    return min(times)


def wait_for_device(device: torch.device | None) -> None:
    """Until a GPU has done all that it was given; others have."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
