"""What a user would pick instead: other ways to offload activations."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import AbstractContextManager
from typing import Any

import torch

__all__ = ["save_on_cpu", "trl_offload"]


def save_on_cpu() -> AbstractContextManager[Any]:
    """PyTorch's own hook, with pinned memory."""
    return torch.autograd.graph.save_on_cpu(pin_memory=True)


def trl_offload() -> AbstractContextManager[Any]:
    """TRL's `OffloadActivations`, from its released wheel; its one file is loaded by itself.

    Raises:
        ImportError: if TRL is not on the path.
    """
    from accelerate import PartialState

    PartialState()  # TRL's logger needs it
    for folder in sys.path:
        path = f"{folder}/trl/models/activation_offloading.py"
        spec = importlib.util.spec_from_file_location("trl_activation_offloading", path)
        try:
            module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
            spec.loader.exec_module(module)  # type: ignore[union-attr]
        except FileNotFoundError:
            continue
        offload: AbstractContextManager[Any] = module.OffloadActivations()
        return offload
    raise ImportError("expected the trl package on PYTHONPATH, found none; unpack its wheel there")
