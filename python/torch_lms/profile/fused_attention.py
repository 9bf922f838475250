"""Attention on the meta device as a device computes it: `fused_attention`.

Note [Attention without a device]: on the meta device PyTorch computes attention step by step and keeps the weights of
all pairs of tokens, which no device does: kernels keep what goes in and comes out, and one number for each token. So
there `scaled_dot_product_attention` stands for the op of such a kernel: with a mask for the memory-efficient one, else
for flash attention. What neither takes stays as it is: other than four dimensions, and heads wider than 256.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn import functional

from torch_lms._torch_compat import function_mode

__all__ = ["fused_attention"]

_WIDEST_HEAD = 256


def fused_attention() -> AbstractContextManager[Any]:
    """Where it is entered; see Note [Attention without a device]. Attention inside of other ops is not seen."""
    return function_mode(_call)


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return (_fused if func in _ATTENTION else func)(*args, **kwargs)


def _fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **others: Any,
) -> torch.Tensor:
    """With the arguments of ``scaled_dot_product_attention``."""
    scale = others.get("scale")
    if not all(one.is_meta and one.dim() == 4 and one.shape[-1] <= _WIDEST_HEAD for one in (query, key, value)):
        return functional.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **others)
    aten = torch.ops.aten
    if attn_mask is None:
        made = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)
    else:
        bias = attn_mask.to(query.dtype) if attn_mask.dtype == torch.bool else attn_mask
        bias = bias.expand(*query.shape[:-1], key.shape[-2])
        made = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, dropout_p, is_causal, scale=scale
        )
    output: torch.Tensor = made[0]
    return output


_ATTENTION = (
    (functional.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default)
    if hasattr(functional, "scaled_dot_product_attention")
    else ()
)
