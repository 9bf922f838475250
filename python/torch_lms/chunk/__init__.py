"""Model data in equal chunks: parameters, gradients in their place, and optimizer state."""

# ruff: noqa: E402 (the rest needs a later PyTorch)
from __future__ import annotations

from torch_lms._core import need_extension

need_extension("chunks", "hold optimizer state by hand, or use stock PyTorch 2.11 or later")

from torch_lms.chunk.interface import chunked
from torch_lms.chunk.optimizer import ChunkedOptimizer
from torch_lms.chunk.sharded_state import ShardedState
from torch_lms.chunk.units import order_of_use

__all__ = ["ChunkedOptimizer", "ShardedState", "chunked", "order_of_use"]
