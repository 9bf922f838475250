"""The rate of the link between host and device: plain asynchronous copies of pinned memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torch_lms.swap.link import copy_seconds

__all__ = ["LinkRate", "measure_link"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkRate:
    """Bytes a second, in each direction alone and the sum of both at once."""

    to_host: float
    to_device: float
    both: float


def measure_link(nbytes: int = 1 << 30, rounds: int = 5, device: str = "cuda") -> LinkRate:
    """Measures with copies of ``nbytes`` in each direction; the fastest of ``rounds``."""
    host = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    out, back = (host[0], there[0]), (there[1], host[1])
    return LinkRate(
        to_host=nbytes / copy_seconds(out, rounds=rounds),
        to_device=nbytes / copy_seconds(back, rounds=rounds),
        both=2 * nbytes / copy_seconds(out, back, rounds=rounds),
    )
