"""What model data in chunks takes."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_lms
from tests.chunk.plain import Chunked, Plain, loss_of, same, train
from tests.chunk.test_chunked import ADAMW, Owner, in_order
from tests.unit.markers import counts_exactly
from tests.unit.trainings import GPT, MIN_BYTES, one_thread, token_batch, vector_batch


def allocated_bytes() -> int:
    gc.collect()
    return torch_lms.stats().allocated_bytes


@counts_exactly
@one_thread()
@pytest.mark.parametrize(("reuse", "each"), [(True, 14), (False, 16)])
def test_bytes_a_parameter(reuse: bool, each: int, paged: Any) -> None:
    torch_lms.swap.count_cpu_allocations()
    before = allocated_bytes()
    chunked = Chunked(Owner(in_order, parts=12), ADAMW, reuse_gradients=reuse)
    numel = sum(one.numel() for one in chunked.parameters)
    for number in range(3):
        chunked.zero_grad()
        loss = loss_of(chunked.model, vector_batch(number))
        loss.backward()
        del loss
        after_backward = allocated_bytes() - before
        chunked.step()
    assert after_backward == pytest.approx(each * numel, rel=0.02)
    assert allocated_bytes() - before == pytest.approx(14 * numel, rel=0.02)
    assert chunked.optimizer._data.layout.waste < 0.01


@counts_exactly
@one_thread()
def test_a_chunk_moves_as_one(paged: Any) -> None:
    torch_lms.swap.count_cpu_allocations()
    before = allocated_bytes()
    model = Owner(in_order, parts=12)
    numel = sum(one.numel() for one in model.parameters())
    limit_bytes = before + 8 * numel
    paged.enable({"cpu": limit_bytes}, min_bytes=MIN_BYTES)
    chunked = Chunked(model, ADAMW)
    for number in range(3):
        torch_lms.stats(reset=True)
        chunked.zero_grad()
        loss_of(chunked.model, vector_batch(number)).backward()
        chunked.step()
    stats = torch_lms.stats()
    assert stats.peak_allocated_bytes <= limit_bytes
    assert stats.pageouts > 0
    assert stats.pageout_bytes / stats.pageouts > 1 << 18  # of half a MiB or one, most of them
    assert all(torch.isfinite(one).all() for one in chunked.masters)


def mapped_bytes(folder: Path) -> int:
    """Of files in a folder that the process has mapped, deleted ones as well."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines if str(folder) in line]
    return sum(int(end, 16) - int(begin, 16) for begin, end in spans)


@counts_exactly
@one_thread()
def test_a_gpt_trains_with_its_chunks_in_a_mapped_file(paged: Any, tmp_path: Path) -> None:
    """On a processor the host's memory is a file: that of the chunks that the limit leaves no room for."""
    torch.manual_seed(0)
    expected = list(train(Plain(GPT(), ADAMW), token_batch, 6))
    torch_lms.swap.count_cpu_allocations()
    before = allocated_bytes()
    torch.manual_seed(0)
    model = GPT()
    numel = sum(one.numel() for one in model.parameters())
    paged.enable({"cpu": before + 10 * numel}, min_bytes=MIN_BYTES, spill_dir=tmp_path)
    torch_lms.stats(reset=True)
    made = list(train(Chunked(model, ADAMW), token_batch, 6))
    assert len(made) == len(expected)
    assert mapped_bytes(tmp_path) >= 4 * numel
    stats = torch_lms.stats()
    assert stats.peak_allocated_bytes <= stats.limit_bytes
    assert stats.pageouts > 0
    assert all(map(same, made, expected))
