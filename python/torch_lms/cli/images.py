"""Pictures without a download: striped patterns whose direction is their class, under noise."""

from __future__ import annotations

import math

import torch

__all__ = ["CLASSES", "ImageBatches"]

CLASSES = 10


class ImageBatches:
    """Random striped images; the same seed gives the same batches.

    Args:
        batch: images a batch.
        size: rows, and columns, of an image.
        seed: of classes, phases and noise.
    """

    def __init__(self, *, batch: int, size: int, seed: int) -> None:
        self._batch = batch
        self._size = size
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The next batch: images (B, 3, Y, X) and their classes (B), on the CPU."""
        classes_B = torch.randint(CLASSES, (self._batch,), generator=self._generator)
        phases_B1 = 2 * math.pi * torch.rand(self._batch, 1, generator=self._generator)
        angles_B1 = math.pi / CLASSES * classes_B[:, None]
        along_S = torch.arange(self._size) / 2.0
        rows_BY = along_S * angles_B1.sin() + phases_B1
        columns_BX = along_S * angles_B1.cos()
        stripes_BYX = (rows_BY[:, :, None] + columns_BX[:, None, :]).sin()
        shape = (self._batch, 3, self._size, self._size)
        noise_BCYX = torch.randn(shape, generator=self._generator)
        return stripes_BYX[:, None] + 0.5 * noise_BCYX, classes_B
