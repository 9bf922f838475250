"""Waits for sends and receives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_lms.pipeline.liveness import Liveness

__all__ = ["wait_all"]


def wait_all(works: Sequence[tuple[torch.Tensor, Any]], liveness: Liveness) -> list[torch.Tensor]:
    """Waits for transfers of tensors, and gives the tensors.

    On a CPU the wait blocks and is left if a rank dies. On CUDA the current stream waits, not the program.
    """
    here = [work for tensor, work in works if tensor.device.type != "cpu"]
    blocking = [work for tensor, work in works if tensor.device.type == "cpu"]
    for work in here:
        work.wait()
    if blocking:
        liveness.run(lambda: [work.wait() for work in blocking])
    return [tensor for tensor, _ in works]
