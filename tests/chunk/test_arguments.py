"""What `chunked` cannot be called with is said so in words of its own, before anything changes; on all ranks alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_lms
from tests.chunk.small_model import ADAMW, chunked, make, step
from tests.chunk.test_chunked import storages_of
from tests.pipeline.ranks import run_ranks
from torch_lms.errors import ChunkError


def expect_refused(error: str, **options: Any) -> None:
    torch.manual_seed(0)
    model = make()
    before, versions = storages_of(model), [one._version for one in model.parameters()]
    state = torch.get_rng_state()
    with pytest.raises(ChunkError, match=error):
        chunked(model, **options)
    assert (storages_of(model), [one._version for one in model.parameters()]) == (before, versions)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch_lms.swap.is_enabled()
    step(*chunked(model))


@pytest.mark.parametrize("name", ["reuse_gradients", "step_in_backward"])
@pytest.mark.parametrize("value", ["no", None, 1, torch.zeros(2)], ids=str)
def test_switches_are_true_or_false(name: str, value: Any) -> None:
    expect_refused(f"expected {name} to be True or False, found", **{name: value})


@pytest.mark.parametrize("value", [[[]], [{}], [None], 5, "ab"], ids=str)
def test_orders_are_of_parameters(value: Any) -> None:
    expect_refused("expected an order of the model's own parameters, found", order=value)


@pytest.mark.parametrize("value", [True, 1.0, "1"])
def test_sizes_of_chunks_are_whole_numbers(value: Any) -> None:
    expect_refused("expected chunk_numel to be a number of elements, found", chunk_numel=value)


@pytest.mark.parametrize("exponent", [12, 18, 30])
def test_chunks_that_nothing_has_room_for_are_refused(exponent: int) -> None:
    expect_refused(rf"room on cpu for a chunk of 10{{{exponent}}} elements", chunk_numel=10**exponent)


def test_models_are_modules() -> None:
    model = make()
    for other, found in [(None, "NoneType"), (list(model.parameters()), "list"), (nn.Linear, "the class Linear")]:
        with pytest.raises(ChunkError, match=f"expected a model, a torch.nn.Module, found {found}; pass"):
            torch_lms.chunked(other, ADAMW(model.parameters()))  # type: ignore[type-var]


def test_small_sizes_can_be_told_from_one_another() -> None:
    expect_refused(r"a chunk of \d+ elements, \S+ KiB, found 1.00 KiB", device_limit="1KiB")
    expect_refused(
        r"model's data, \S+ KiB \(.*\), found 40.00 KiB on cpu and 2.00 KiB on",
        device_limit="40KiB",
        host_limit="2KiB",
    )
    expect_refused(r"found 1.50 MiB", chunk_numel=10**6, device_limit="1.5MiB")


def test_automatic_mode_is_on_only_if_there_are_chunks(paged: Any) -> None:
    with pytest.raises(ChunkError, match="room for chunks"):
        chunked(make(), device_limit="24KiB")
    assert not torch_lms.swap.is_enabled()
    paged.enable({"cpu": "2GiB"})
    with pytest.raises(ChunkError, match="room for chunks"):
        chunked(make(), device_limit="24KiB")
    assert torch_lms.swap.automatic.present_limits() == {"cpu": 2 << 30}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ranks_that_differ_are_told_so(tmp_path: Path) -> None:
    for rank, ended in enumerate(run_ranks("tests.chunk.spread_arguments:unlike+failing+alike", 2, tmp_path)):
        assert ended.status == 0, f"rank {rank}:\n{ended.output[-4000:]}"
