"""Bit-equality of tensors of every kind."""

from __future__ import annotations

import torch

__all__ = ["same_tensors"]


def same_tensors(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Whether two results are equal bit by bit, where NaN equals NaN."""
    return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same values; NaN equals NaN."""
    one, other = (_dense(tensor.detach()) for tensor in (one, other))
    if one.dtype is not other.dtype or one.shape != other.shape:
        return False
    if one.is_floating_point() and one.element_size() == 1:
        one, other = one.view(torch.uint8), other.view(torch.uint8)
    elif one.is_floating_point():
        one, other = (tensor.nan_to_num(nan=1.25, posinf=2.5, neginf=-2.5) for tensor in (one, other))
    return torch.equal(one, other)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    return torch.view_as_real(tensor.resolve_conj().resolve_neg()) if tensor.is_complex() else tensor
