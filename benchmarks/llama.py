"""Llama for inference, with random weights and a cache of keys and values that is made once.

Shapes: B batch, T tokens, H hidden, N heads, D of a head, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

__all__ = ["Llama", "LlamaShape"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaShape:
    """Sizes of a `Llama`; those of Llama 7B if none are given.

    Raises:
        ValueError: if the heads do not divide the hidden size into even parts.
    """

    layers: int = 32
    hidden: int = 4096
    inner: int = 11008
    heads: int = 32
    vocabulary: int = 32000

    def __post_init__(self) -> None:
        if self.hidden % (2 * self.heads):
            raise ValueError(f"expected heads of an even size, found {self.hidden} / {self.heads}; change one of them")


class _Layer(nn.Module):
    """Attention over all tokens so far and a gated MLP, each behind a norm and beside a residual."""

    def __init__(self, shape: LlamaShape, batch: int, tokens: int) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm1 = nn.RMSNorm(shape.hidden)
        self.q, self.k, self.v, self.o = (nn.Linear(shape.hidden, shape.hidden, bias=False) for _ in range(4))
        self.norm2 = nn.RMSNorm(shape.hidden)
        self.gate = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.hidden, bias=False)
        cache_BNTD = torch.zeros(batch, shape.heads, tokens, shape.hidden // shape.heads)
        self.register_buffer("keys", cache_BNTD, persistent=False)
        self.register_buffer("values", cache_BNTD.clone(), persistent=False)

    def forward(self, x_BTH: torch.Tensor, turn_TD: tuple[torch.Tensor, torch.Tensor], begin: int) -> torch.Tensor:
        """One layer, for tokens from ``begin`` on."""
        batch, tokens, hidden = x_BTH.shape
        end = begin + tokens
        y_BTH = self.norm1(x_BTH)
        q, k, v = (part(y_BTH).view(batch, tokens, self.heads, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        keys, values = self.keys[:, :, begin:end], self.values[:, :, begin:end]  # type: ignore[index]
        keys.copy_(_turned(k, turn_TD))
        values.copy_(v)
        attended = functional.scaled_dot_product_attention(
            _turned(q, turn_TD),
            self.keys[:, :, :end],  # type: ignore[index]
            self.values[:, :, :end],  # type: ignore[index]
            is_causal=tokens > 1,
        )
        x_BTH = x_BTH + self.o(attended.transpose(1, 2).reshape(batch, tokens, hidden))
        y_BTH = self.norm2(x_BTH)
        z_BTH: torch.Tensor = self.down(functional.silu(self.gate(y_BTH)) * self.up(y_BTH))
        return x_BTH + z_BTH


def _turned(x_BNTD: torch.Tensor, turn_TD: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary positions."""
    cosine, sine = turn_TD
    one, other = x_BNTD.chunk(2, -1)
    return x_BNTD * cosine + torch.cat((-other, one), -1) * sine


class Llama(nn.Module):
    """Token ids to the logits of the token after the last.

    Args:
        shape: its sizes.
        batch: how many sequences there are.
        tokens: how many each may have.
    """

    def __init__(self, shape: LlamaShape, *, batch: int, tokens: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(_Layer(shape, batch, tokens) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        self.rates = shape.hidden // shape.heads // 2  # of rotation, in each head

    def forward(self, ids_BT: torch.Tensor, begin: int) -> torch.Tensor:
        """Logits after tokens whose first stands at ``begin``; those before it are in the cache."""
        positions = torch.arange(begin, begin + ids_BT.shape[1], device=ids_BT.device)
        rates = torch.pow(10000.0, -torch.arange(self.rates, device=ids_BT.device) / self.rates)
        angles_TD = torch.outer(positions, rates).repeat(1, 2)
        x_BTH = self.embed(ids_BT)
        turn_TD = (angles_TD.cos().to(x_BTH.dtype), angles_TD.sin().to(x_BTH.dtype))
        for layer in self.layers:
            x_BTH = layer(x_BTH, turn_TD, begin)
        logits_BV: torch.Tensor = self.head(self.norm(x_BTH[:, -1]))
        return logits_BV
