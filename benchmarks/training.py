"""What the training benchmarks share: the same bits in each run, and a digest of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

__all__ = ["GIB", "digest", "forget_workspace_setting", "gradient_digest", "make_deterministic"]

GIB = 1 << 30
_WORKSPACE_SETTING = "CUBLAS_WORKSPACE_CONFIG"


def make_deterministic(*, warn_only: bool | None = None) -> None:
    """Fixes the order of additions (flash attention's backward has none otherwise), for comparing bits.

    Args:
        warn_only: whether an op that has no such order may run all the same; by default only where there is no GPU.
    """
    os.environ[_WORKSPACE_SETTING] = ":4096:8"
    warn_only = not torch.cuda.is_available() if warn_only is None else warn_only
    torch.use_deterministic_algorithms(mode=True, warn_only=warn_only)
    if hasattr(torch.utils, "deterministic"):  # from 2.2 on
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def forget_workspace_setting() -> None:
    """To be called after the first step: what that has run keeps its order of additions.

    PyTorch asks once whether cuBLAS's workspaces have a fixed size. While they have, version 2.11 makes a regular
    expression at each matmul to read it, which takes the host longer than to launch one. A GPU of compute capability 9
    has the same size without.
    """
    os.environ.pop(_WORKSPACE_SETTING, None)


def digest(tensors: Iterable[torch.Tensor | None]) -> str:
    """A hash of every tensor's bits, read from copies: what numpy has seen would never move again."""
    with ThreadPoolExecutor(8) as pool:  # hashing takes longer than copying, and runs without the GIL
        hashes = pool.map(_hash, (tensor if tensor is None else _host_copy(tensor) for tensor in tensors))
        return hashlib.sha256(b"".join(hashes)).hexdigest()


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _hash(tensor: torch.Tensor | None) -> bytes:
    """The hash of a tensor on the host; what is missing differs from what is empty."""
    if tensor is None:
        return hashlib.sha256(b"none").digest()
    return hashlib.sha256(tensor.flatten().view(torch.uint8).numpy().data).digest()


def gradient_digest(model: nn.Module) -> str:
    """A hash of every gradient's bits."""
    return digest(parameter.grad for parameter in model.parameters())
