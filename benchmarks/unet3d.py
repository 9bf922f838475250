"""A 3D U-Net for segmentation (Çiçek et al. 2016, with strided convolutions and instance norm as in nnU-Net).

Shapes: B batch, C channels, Z, Y and X depth, rows and columns.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

__all__ = ["UNet3d"]


class _Convolutions(nn.Module):
    """Two 3x3x3 convolutions, each with instance norm and a leaky ReLU; the first has the stride."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.InstanceNorm3d(channels, affine=True)
        self.conv2 = nn.Conv3d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.InstanceNorm3d(channels, affine=True)

    def forward(self, x_BCZYX: torch.Tensor) -> torch.Tensor:
        """One level's features."""
        x_BCZYX = functional.leaky_relu(self.norm1(self.conv1(x_BCZYX)), 0.01)
        return functional.leaky_relu(self.norm2(self.conv2(x_BCZYX)), 0.01)


class UNet3d(nn.Module):
    """Volumes to the loss of telling each voxel's classes, of which several may hold.

    Args:
        channels: of each level, the finest first.
        modalities: channels of the input.
        classes: that a voxel may have.
    """

    def __init__(self, channels: tuple[int, ...], *, modalities: int = 4, classes: int = 3) -> None:
        super().__init__()
        before = (modalities, *channels)
        self.down = nn.ModuleList(
            _Convolutions(before[level], wide, 2 if level else 1) for level, wide in enumerate(channels)
        )
        pairs = [(channels[level + 1], channels[level]) for level in reversed(range(len(channels) - 1))]
        self.grow = nn.ModuleList(nn.ConvTranspose3d(coarse, fine, 2, 2) for coarse, fine in pairs)
        self.up = nn.ModuleList(_Convolutions(2 * fine, fine, 1) for _, fine in pairs)
        self.head = nn.Conv3d(channels[0], classes, 1)

    def forward(self, x_BCZYX: torch.Tensor, labels_BCZYX: torch.Tensor) -> torch.Tensor:
        """The mean binary cross entropy."""
        kept = []
        for level in self.down:
            x_BCZYX = level(x_BCZYX)
            kept.append(x_BCZYX)
        for grow, level, beside_BCZYX in zip(self.grow, self.up, reversed(kept[:-1]), strict=True):
            x_BCZYX = level(torch.cat((grow(x_BCZYX), beside_BCZYX), 1))
        return functional.binary_cross_entropy_with_logits(self.head(x_BCZYX).float(), labels_BCZYX)
