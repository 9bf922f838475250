"""Real text without a download: the sources of the Python standard library of this machine, byte by byte."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

__all__ = ["VOCABULARY", "TextBatches", "read_text"]

VOCABULARY = 256  # a token is a byte


def read_text(max_bytes: int = 4 << 20, folder: Path | None = None) -> bytes:
    """Reads Python sources in the order of their names.

    Args:
        max_bytes: enough; the rest is not read.
        folder: where the sources lie; by default the standard library.

    Raises:
        FileNotFoundError: if the folder has no sources.
    """
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    if not text:
        raise FileNotFoundError(
            f"expected Python sources in {folder}, found none; use a Python that has its standard library as files"
        )
    return bytes(text[:max_bytes])


class TextBatches:
    """Random excerpts of a text; the same seed gives the same batches.

    Args:
        text: at least ``tokens + 1`` bytes.
        batch: excerpts a batch.
        tokens: bytes an excerpt.
        seed: of the choice of excerpts.
    """

    def __init__(self, text: bytes, *, batch: int, tokens: int, seed: int) -> None:
        if len(text) <= tokens:
            raise ValueError(f"expected a text of more than {tokens} bytes, found {len(text)}; ask for fewer tokens")
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._offsets_T = torch.arange(tokens + 1)
        self._batch = batch
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The next batch: tokens and, shifted by one, the tokens to predict; both (B, T) on the CPU."""
        last = len(self._bytes) - len(self._offsets_T) + 1
        starts_B1 = torch.randint(last, (self._batch, 1), generator=self._generator)
        excerpts = self._bytes[starts_B1 + self._offsets_T].long()
        return excerpts[:, :-1], excerpts[:, 1:]
