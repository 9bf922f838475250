"""What the training benchmarks share: the same bits in each run, and a digest of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable

import torch
from torch import nn

__all__ = ["GIB", "digest", "gradient_digest", "make_deterministic"]

GIB = 1 << 30


def make_deterministic() -> None:
    """Fixes the order of additions (flash attention's backward has none otherwise), for comparing bits."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(mode=True, warn_only=not torch.cuda.is_available())
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def digest(tensors: Iterable[torch.Tensor | None]) -> str:
    """A hash of every tensor's bits, read from copies: what numpy has seen would never move again."""
    hashed = hashlib.sha256()
    for tensor in tensors:
        if tensor is None:
            hashed.update(b"none")
            continue
        copy = tensor.detach().to("cpu", copy=True).contiguous().flatten()
        hashed.update(copy.view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def gradient_digest(model: nn.Module) -> str:
    """A hash of every gradient's bits."""
    return digest(parameter.grad for parameter in model.parameters())
