"""The GPT of the benchmarks: pre-norm blocks, causal attention, untied head.

Shapes: B batch, T tokens, H hidden, N heads, V vocabulary.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

__all__ = ["GPT", "GPTShape", "gradient_digest"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTShape:
    """Sizes; the defaults make the 1.3-billion-parameter model of the tables."""

    layers: int = 24
    hidden: int = 2048
    heads: int = 16
    vocabulary: int = 32000
    batch: int = 16
    tokens: int = 2048


class Block(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm1 = nn.LayerNorm(shape.hidden)
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden)
        self.proj = nn.Linear(shape.hidden, shape.hidden)
        self.norm2 = nn.LayerNorm(shape.hidden)
        self.up = nn.Linear(shape.hidden, 4 * shape.hidden)
        self.down = nn.Linear(4 * shape.hidden, shape.hidden)

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        """One block; the shape stays."""
        batch, tokens, hidden = x_BTH.shape
        qkv = self.qkv(self.norm1(x_BTH)).view(batch, tokens, 3, self.heads, -1)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTH = x_BTH + self.proj(attended.transpose(1, 2).reshape(batch, tokens, hidden))
        mlp: torch.Tensor = self.down(functional.gelu(self.up(self.norm2(x_BTH))))
        return x_BTH + mlp


class GPT(nn.Module):
    """Token ids (B, T) to the mean cross entropy of the next token."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.hidden)
        self.position = nn.Embedding(shape.tokens, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """The loss of predicting each token from those before it."""
        positions = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        x_BTH = self.embed(ids_BT) + self.position(positions)
        for block in self.blocks:
            x_BTH = block(x_BTH)
        logits_BTV = self.head(self.norm(x_BTH))
        return functional.cross_entropy(logits_BTV.flatten(0, 1), ids_BT.roll(-1, 1).flatten())


def gradient_digest(model: nn.Module) -> str:
    """A hash of every gradient's bits."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        if parameter.grad is not None:
            digest.update(parameter.grad.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
