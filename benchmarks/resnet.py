"""ResNet-50 and ResNet-152 as they were published (He et al. 2015), for measuring: torchvision may be absent."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

__all__ = ["ResNet"]

_BLOCKS = {50: (3, 4, 6, 3), 152: (3, 8, 36, 3)}
_EXPANSION = 4


class _Bottleneck(nn.Module):
    """1x1, 3x3 (with the stride) and 1x1 convolutions, beside a shortcut that is projected where the shape changes."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        channels_out = channels * _EXPANSION
        self.conv1 = nn.Conv2d(channels_in, channels, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, channels_out, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(channels_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False), nn.BatchNorm2d(channels_out)
            )

    def forward(self, x_BCYX: torch.Tensor) -> torch.Tensor:
        """One block."""
        y_BCYX = functional.relu(self.norm1(self.conv1(x_BCYX)))
        y_BCYX = functional.relu(self.norm2(self.conv2(y_BCYX)))
        return functional.relu(self.norm3(self.conv3(y_BCYX)) + self.shortcut(x_BCYX))


class ResNet(nn.Module):
    """Images to the mean cross entropy of their classes.

    Args:
        depth: 50 or 152.
        channels: of the stem; 64 as published.
        classes: that there are.
    """

    def __init__(self, depth: int = 50, *, channels: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 7, 2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        blocks: list[nn.Module] = []
        channels_in = channels
        for stage, count in enumerate(_BLOCKS[depth]):
            for index in range(count):
                blocks.append(_Bottleneck(channels_in, channels << stage, 2 if stage and index == 0 else 1))
                channels_in = (channels << stage) * _EXPANSION
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels_in, classes)

    def forward(self, images_BCYX: torch.Tensor, classes_B: torch.Tensor) -> torch.Tensor:
        """The loss of telling each image's class."""
        x_BCYX = functional.relu(self.norm(self.stem(images_BCYX)))
        x_BCYX = self.blocks(functional.max_pool2d(x_BCYX, 3, 2, padding=1))
        return functional.cross_entropy(self.head(x_BCYX.mean((2, 3))), classes_B)
