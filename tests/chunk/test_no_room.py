"""Where memory runs out while chunks are made, the model stays as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_lms
from tests.chunk.plain import Chunked, Plain, train
from tests.chunk.small_model import ADAMW, batch
from tests.chunk.test_chunk_ranks import expect_success
from tests.chunk.test_chunked import storages_of
from tests.unit.markers import counts_exactly
from tests.unit.trainings import one_thread
from torch_lms.chunk.model_data import ChunkList
from torch_lms.errors import ChunkError

ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ChunkError("expected to pin 4 bytes of host memory, found CUDA's error 2"),
    OSError("Cannot allocate memory"),
]
IN_CHUNKS = partial(Chunked, optimize=ADAMW, chunk_numel=64 * 64)
CHUNKS = 13  # that the model begins with: of weights, biases, and what is its own master


def make() -> nn.Sequential:
    """Some of it is its own master, some of that frozen."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.Linear(64, 64), nn.BatchNorm1d(64)]
    layers[-1].requires_grad_(False)
    return nn.Sequential(*layers, nn.Linear(64, 8))


@contextmanager
def failing_at(allocation: int, error: Exception) -> Iterator[list[int]]:
    """Has that allocation of a chunk fail; the list gets the numbers of all that have been asked for."""
    made, chunk = [], ChunkList.chunk

    def failing(self: ChunkList, number: int) -> torch.Tensor:
        if number not in self.used:
            made.append(number)
            if len(made) > allocation:
                raise error
        return chunk(self, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChunkList, "chunk", failing)
        yield made


def test_the_chunks_that_a_model_begins_with() -> None:
    with failing_at(100, ERRORS[0]) as made:
        IN_CHUNKS(make())
    assert len(made) == CHUNKS


@one_thread()
@pytest.mark.parametrize("allocation", range(CHUNKS))
def test_a_model_that_has_no_room_stays_as_it_was(allocation: int) -> None:
    model, error = make(), ERRORS[allocation % len(ERRORS)]
    before, storages = [one.clone() for one in model.parameters()], storages_of(model)
    with failing_at(allocation, error), pytest.raises(ChunkError, match="expected room for chunks of") as raised:
        IN_CHUNKS(model, device_limit="1GiB")
    assert raised.value.__cause__ is error
    assert f"iB on cpu, beside the model as it is, found {type(error).__name__}: {error}; " in str(raised.value)
    assert not torch_lms.swap.is_enabled()
    assert all(map(torch.equal, model.parameters(), before))
    assert storages_of(model) == storages
    assert not any(one._post_accumulate_grad_hooks for one in model.parameters())
    for expected, found in zip(train(Plain(make(), ADAMW), batch, 3), train(IN_CHUNKS(model), batch, 3), strict=True):
        assert torch.equal(found[0], expected[0])


def test_an_allocator_that_refuses_is_told_so() -> None:
    model = make()
    expected = r"expected room .*iB on cpu, .* RuntimeError: .*allocate memory.*on the meta"
    with pytest.raises(ChunkError, match=expected):
        Chunked(model, ADAMW, chunk_numel=1 << 46, device_limit="1024TiB")  # more than there are addresses
    assert all(one.dtype == torch.float32 for one in model.parameters())


@counts_exactly
def test_who_keeps_the_error_keeps_no_chunks(paged: Any) -> None:
    torch_lms.swap.count_cpu_allocations()
    model, error = make(), RuntimeError("on purpose")
    gc.collect()
    before = torch_lms.stats().allocated_bytes
    with failing_at(CHUNKS - 1, error), pytest.raises(ChunkError) as raised:
        IN_CHUNKS(model)
    assert torch_lms.stats().allocated_bytes == before, raised.value


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_limit_that_held_before_holds_again(device: str, paged: Any) -> None:
    paged.enable({"cpu": 3 << 30})
    model = make()
    for module in model.modules():
        for name, one in module._parameters.items():
            module._parameters[name] = nn.Parameter(one.detach().to(device), requires_grad=one.requires_grad)
    error = RuntimeError("on purpose")
    with failing_at(3, error), pytest.raises(ChunkError, match="found RuntimeError: on purpose"):
        IN_CHUNKS(model, device="cpu", device_limit="1GiB")
    assert torch_lms.swap.automatic.present_limits() == {"cpu": 3 << 30}
    assert all(one.device.type == device and one.dtype == torch.float32 for one in model.parameters())


@pytest.mark.slow
def test_what_runs_out_on_one_rank_is_told_to_all(tmp_path: Path) -> None:
    expect_success("spread_kept:no_room", 2, tmp_path)
