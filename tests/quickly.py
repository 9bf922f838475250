"""What makes many small tests in one process, and processes that are forked from it, quick."""

from __future__ import annotations

import gc
import sys

__all__ = ["begin_quickly"]


def begin_quickly() -> None:
    """To be called once everything has been imported."""
    if "torch" in sys.modules:
        _seed_what_is_there()
    gc.collect()
    gc.freeze()  # or each collection, and each interpreter's end, goes through all of PyTorch's objects: up to a second


def _seed_what_is_there() -> None:
    """Makes `torch.manual_seed` quick on the CPU's PyTorch: it keeps each seed for later, with the caller's stack.

    That takes milliseconds under pytest, whose stacks are deep.
    """
    import torch

    if torch.backends.cuda.is_built():
        return
    for name in ("cuda", "xpu", "mtia"):
        device = getattr(torch, name, None)
        if device is not None:
            device.manual_seed_all = _forget


def _forget(seed: int) -> None:
    """Of a device that is not there."""
