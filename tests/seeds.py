"""Seeds as tests set them by the thousand: without what PyTorch keeps of each for devices that it has no code for."""

from __future__ import annotations

import torch


def seed_what_is_there() -> None:
    """Makes `torch.manual_seed` quick on the CPU's PyTorch: it keeps each seed for later, with the caller's stack.

    That takes milliseconds under pytest, whose stacks are deep.
    """
    if torch.backends.cuda.is_built():
        return
    for name in ("cuda", "xpu", "mtia"):
        device = getattr(torch, name, None)
        if device is not None:
            device.manual_seed_all = _forget


def _forget(seed: int) -> None:
    """Of a device that is not there."""
