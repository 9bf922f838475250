"""The models of the demo, in pure PyTorch: a GPT with causal attention and a residual network.

Both map one batch to their loss, so that a training loop needs to know neither.

Shapes: B batch, T tokens, H hidden, N heads, V vocabulary, C channels, Y and X rows and columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

__all__ = ["GPT", "GPTShape", "ResNet", "ResNetShape"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTShape:
    """Sizes of a `GPT`.

    Raises:
        ValueError: if a size is not positive or the heads do not divide the hidden size.
    """

    layers: int
    hidden: int
    heads: int
    tokens: int
    vocabulary: int

    def __post_init__(self) -> None:
        if min(self.layers, self.hidden, self.heads, self.tokens, self.vocabulary) < 1:
            raise ValueError(f"expected sizes of at least 1, found {self}; pass positive sizes")
        if self.hidden % self.heads:
            raise ValueError(
                f"expected a hidden size that the heads divide, found {self.hidden} and {self.heads} heads; "
                "change one of them"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ResNetShape:
    """Sizes of a `ResNet`.

    Raises:
        ValueError: if a size is not positive.
    """

    layers: int
    channels: int
    classes: int

    def __post_init__(self) -> None:
        if min(self.layers, self.channels, self.classes) < 1:
            raise ValueError(f"expected sizes of at least 1, found {self}; pass positive sizes")


class _TransformerBlock(nn.Module):
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
        y_BTH: torch.Tensor = self.down(functional.gelu(self.up(self.norm2(x_BTH))))
        return x_BTH + y_BTH


class GPT(nn.Module):
    """Pre-norm transformer: token ids to the mean cross entropy of the next token."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.hidden)
        self.position = nn.Embedding(shape.tokens, shape.hidden)
        self.blocks = nn.ModuleList(_TransformerBlock(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, ids_BT: torch.Tensor, next_ids_BT: torch.Tensor) -> torch.Tensor:
        """The loss of predicting each token from those before it."""
        positions = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        x_BTH = self.embed(ids_BT) + self.position(positions)
        for block in self.blocks:
            x_BTH = block(x_BTH)
        logits_BTV = self.head(self.norm(x_BTH))
        return functional.cross_entropy(logits_BTV.flatten(0, 1), next_ids_BT.flatten())


class _ResidualBlock(nn.Module):
    """Two 3x3 convolutions with batch norm, beside a shortcut that is projected where the shape changes."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, x_BCYX: torch.Tensor) -> torch.Tensor:
        """One block."""
        y_BCYX = functional.relu(self.norm1(self.conv1(x_BCYX)))
        return functional.relu(self.norm2(self.conv2(y_BCYX)) + self.shortcut(x_BCYX))


class ResNet(nn.Module):
    """Three stages of residual blocks; each stage after the first halves the image and doubles the channels."""

    def __init__(self, shape: ResNetShape) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, shape.channels, 3, padding=1, bias=False)
        blocks: list[nn.Module] = []
        channels_in = shape.channels
        for stage in range(3):
            channels = shape.channels << stage
            for index in range(shape.layers):
                stride = 2 if stage and index == 0 else 1
                blocks.append(_ResidualBlock(channels_in, channels, stride))
                channels_in = channels
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(channels_in, shape.classes)

    def forward(self, images_BCYX: torch.Tensor, classes_B: torch.Tensor) -> torch.Tensor:
        """The loss of telling each image's class."""
        x_BCYX = self.stem(images_BCYX)
        for block in self.blocks:
            x_BCYX = block(x_BCYX)
        return functional.cross_entropy(self.head(x_BCYX.mean((2, 3))), classes_B)
