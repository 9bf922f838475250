"""Pinned host memory: as many bytes as chunks store, for as long as they are there."""

from __future__ import annotations

import gc
import mmap
from types import SimpleNamespace

import pytest
import torch

from torch_lms.chunk.model_data import ChunkList
from torch_lms.errors import ChunkError

NUMELS = [1 << 20, 100_003, (1 << 19) + 1]  # none but the first is a power of two


@pytest.fixture
def pinned_bytes(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """What the driver has been asked to pin, by address."""
    pinned: dict[int, int] = {}

    def register(address: int, nbytes: int, _: int) -> int:
        assert address % mmap.PAGESIZE == 0
        pinned[address] = nbytes
        return 2 if nbytes == 4 else 0

    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=pinned.pop)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    return pinned


def test_as_many_bytes_are_pinned_as_chunks_store(pinned_bytes: dict[int, int]) -> None:
    chunks = ChunkList(NUMELS, torch.float32, [torch.device("cpu")] * len(NUMELS), pins=True)
    views = [chunks.chunk(number)[7:] for number in range(len(NUMELS))]
    assert sum(pinned_bytes.values()) == chunks.allocated_bytes == 4 * sum(NUMELS)
    assert sum(-(-nbytes // mmap.PAGESIZE) for nbytes in pinned_bytes.values()) * mmap.PAGESIZE < 1.03 * 4 * sum(NUMELS)
    assert not any(view.any() for view in views)
    del chunks
    gc.collect()
    assert len(pinned_bytes) == len(NUMELS)  # views keep it
    views.clear()
    gc.collect()
    assert not pinned_bytes


def test_what_cannot_be_pinned_is_said(pinned_bytes: dict[int, int]) -> None:
    with pytest.raises(ChunkError, match="expected to pin 4 bytes of host memory, found CUDA's error 2"):
        ChunkList([1], torch.float32, [torch.device("cpu")], pins=True).chunk(0)
