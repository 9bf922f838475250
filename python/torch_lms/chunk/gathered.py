"""Whole chunks of parameters, where ranks keep parts: they have bytes only while somebody computes with them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
import torch.distributed as dist

from torch_lms._core import core
from torch_lms._torch_compat import all_gather_single
from torch_lms.chunk.layout import Layout
from torch_lms.chunk.ranks import Ranks

__all__ = ["GatheredChunks"]

_NO_BYTES = (
    "expected parameters to be used by a module that is called, found one whose bytes are spread over ranks; call the "
    "module that owns it (of a list of blocks: the block), and have it return its tensors themselves, or in lists, "
    "tuples and dictionaries"
)


class GatheredChunks:
    """For each chunk a storage for all of it, in which parameters and what autograd has saved of them are views.

    It has bytes from `begin` to `release`. Who asks for them at another time gets an error. All ranks must begin the
    same chunks, in the same order.

    Not thread-safe: the owner's lock guards it. On CUDA the current stream waits for a chunk, not the caller.

    Args:
        layout: of the chunks.
        dtype: of the numbers.
        device: of the storages.
        ranks: that keep the parts.
    """

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device, ranks: Ranks) -> None:
        self._layout = layout
        self._dtype = dtype
        self._device = device
        self._ranks = ranks
        self._chunks: dict[int, torch.Tensor] = {}
        self._coming: dict[int, dist.Work] = {}
        self._open: set[int] = set()
        self._trail = 0

    def take_trail(self) -> int:
        """Of what has been gathered since the last time, in its order: 32 bits that are alike where that is."""
        trail, self._trail = self._trail, 0
        return trail

    @property
    def open(self) -> frozenset[int]:
        """The chunks that have bytes, or are about to."""
        return frozenset(self._open)

    def whole(self, chunk: int) -> torch.Tensor:
        """All of an open chunk. The first time it is opened, with any bytes."""
        if chunk not in self._chunks:
            self._chunks[chunk] = torch.empty(self._layout.chunk_numel, dtype=self._dtype, device=self._device)
            self._open.add(chunk)
        return self._chunks[chunk]

    def part(self, chunk: int) -> torch.Tensor:
        """This rank's part of an open chunk."""
        return self.whole(chunk).chunk(self._ranks.size)[self._ranks.rank]

    @torch.no_grad()
    def begin(self, chunk: int, part: torch.Tensor) -> None:
        """Begins to bring a chunk's bytes from all ranks, if it has none.

        Args:
            chunk: which.
            part: this rank's.
        """
        if chunk in self._open:
            return
        whole = self._chunks[chunk]
        core.open_storage(whole)
        whole.untyped_storage().resize_(whole.numel() * whole.element_size())
        self._open.add(chunk)
        self._trail = zlib.crc32(chunk.to_bytes(4, "little"), self._trail)
        with torch.inference_mode(False):
            own = self.part(chunk).copy_(part)
            self._coming[chunk] = all_gather_single(whole, own, group=self._ranks.group, async_op=True)

    def finish(self, chunk: int) -> None:
        """What uses the chunk from now on has its bytes."""
        if work := self._coming.pop(chunk, None):
            work.wait()

    def release(self, chunks: Iterable[int]) -> None:
        """Their bytes are gone."""
        for chunk in chunks:
            if chunk in self._open:
                self.finish(chunk)
                self._open.remove(chunk)
                self._chunks[chunk].untyped_storage().resize_(0)
                core.close_storage(self._chunks[chunk], _NO_BYTES)
