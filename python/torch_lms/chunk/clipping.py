"""Clipping gradients by their norm, also where ranks keep parts of them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from torch_lms.chunk.model_data import ModelData
from torch_lms.chunk.occupancy import Occupancy
from torch_lms.errors import ChunkError

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(data: ModelData, occupancy: Occupancy, max_norm: float, norm_type: float) -> torch.Tensor:
    """Scales gradients so that the norm of all of them together is `max_norm` at most.

    Over several ranks the norm is that of the norms of pieces, in 32 bits; else it is PyTorch's own, bit for bit.

    Returns:
        The norm before.

    Raises:
        ChunkError: over several ranks, for a norm that is not of their parts' norms.
    """
    if data.ranks.group is not None and not norm_type > 0:
        raise ChunkError(
            f"expected a positive norm_type, or inf, over several ranks, found {norm_type}; take one, such as 2"
        )
    occupancy.settle_gradients()
    if data.ranks.group is None:
        return torch.nn.utils.clip_grad_norm_([one.parameter for one in data.tensors], max_norm, norm_type)
    updated = [
        number for number, one in enumerate(data.tensors) if one.group is not None
    ]  # others have each rank's own
    wanted = [number for number in updated if data.tensors[number].parameter.grad is not None]
    cut, whole = [], []
    for number in wanted:
        if not data.is_cut[data.chunk_of(number)]:
            whole.append(occupancy.gradient(number))
        elif data.piece(number).numel:
            cut.append(occupancy.gradient(number))
    total = _powers(cut, norm_type, data.device)
    infinite = norm_type == float("inf")
    dist.all_reduce(total, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=data.ranks.group)
    of_whole = _powers(whole, norm_type, data.device)
    norm = torch.maximum(total, of_whole) if infinite else (total + of_whole) ** (1 / norm_type)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in (*cut, *whole):
        gradient.mul_(scale)
    return norm


def _powers(gradients: list[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """What adds up to the norm's power; the largest, where the norm is infinite."""
    if not gradients:
        return torch.zeros((), device=device)
    norms = torch.stack([torch.linalg.vector_norm(one, norm_type, dtype=torch.float32) for one in gradients])
    return norms.max() if norm_type == float("inf") else (norms**norm_type).sum()
