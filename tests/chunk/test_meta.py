"""Models that are made without bytes get them in chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torch_lms
from tests.chunk.plain import Chunked, Plain, loss_of, same, train
from tests.chunk.test_chunked import ADAMW, Owner, in_order, make
from tests.unit.markers import counts_exactly
from tests.unit.trainings import GPT_TRAINING, RESNET_TRAINING, Training, one_thread, vector_batch
from torch_lms.errors import ChunkError


def without_bytes(model: nn.Module) -> nn.Module:
    """Its parameters, not its buffers."""
    for module in model.modules():
        for name, one in module._parameters.items():
            if one is not None:
                module._parameters[name] = empty_of(one)
    return model


_empty: dict[int, nn.Parameter] = {}


def empty_of(one: nn.Parameter) -> nn.Parameter:
    """The same for the same one: some are tied."""
    return _empty.setdefault(id(one), nn.Parameter(one.detach().to("meta"), requires_grad=one.requires_grad))


@one_thread()
@pytest.mark.parametrize("training", [GPT_TRAINING, RESNET_TRAINING], ids=lambda one: one.name)
def test_a_model_that_is_loaded_tensor_by_tensor_trains_as_one_that_was_there(training: Training) -> None:
    _empty.clear()
    state = make(training).state_dict()
    chunked = Chunked(without_bytes(make(training)), ADAMW, device="cpu")
    for name, value in state.items():
        chunked.model.load_state_dict({name: value}, strict=False)
    plain = Plain(make(training), ADAMW)
    for expected, found in zip(train(plain, training.batch, 3), train(chunked, training.batch, 3), strict=True):
        assert same(expected, found)


@counts_exactly
@one_thread()
def test_filling_takes_no_second_copy(paged: Any) -> None:
    _empty.clear()
    torch_lms.swap.count_cpu_allocations()
    with torch.device("meta"):
        model = Owner(in_order, parts=12)
    numel = sum(one.numel() for one in model.parameters())
    largest = max(one.numel() for one in model.parameters())
    before = torch_lms.stats(reset=True).allocated_bytes
    model, optimizer = torch_lms.chunked(model, ADAMW(model.parameters()), device="cpu")
    for name, one in list(model.named_parameters()):
        model.load_state_dict({name: torch.randn(one.shape)}, strict=False)
    assert torch_lms.stats().peak_allocated_bytes - before <= 1.05 * 6 * numel + 16 * largest
    loss_of(model, vector_batch(0)).backward()
    optimizer.step()


def test_what_has_no_values_cannot_be_used() -> None:
    _empty.clear()
    model, _ = torch_lms.chunked(*with_optimizer(without_bytes(nn.Linear(8, 8))), device="cpu")
    with pytest.raises(ChunkError, match="found 2 without, weight, bias among them; fill them by load_state_dict"):
        model(torch.zeros(1, 8))
    model.load_state_dict({"weight": torch.ones(8, 8)}, strict=False)
    with pytest.raises(ChunkError, match="found 1 without, bias among them"):
        model(torch.zeros(1, 8))
    model.load_state_dict({"bias": torch.ones(8)}, strict=False)
    assert torch.equal(model(torch.ones(1, 8)), torch.full((1, 8), 9.0, dtype=torch.bfloat16))


def with_optimizer(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, ADAMW(model.parameters())


def test_a_device_that_cannot_be_is_refused() -> None:
    _empty.clear()
    with pytest.raises(ChunkError, match="expected device= for a model on the meta device"):
        torch_lms.chunked(*with_optimizer(without_bytes(nn.Linear(8, 8))))
    with pytest.raises(ChunkError, match="expected a model on meta, found it on cpu"):
        torch_lms.chunked(*with_optimizer(nn.Linear(8, 8)), device="meta")
    for device, expected in (("nonsense", "such as 'cuda:0'"), ("cuda:77", "that is here")):
        with pytest.raises(ChunkError, match=f"expected a device {expected}, found '{device}'"):
            torch_lms.chunked(*with_optimizer(nn.Linear(8, 8)), device=device)
    with torch.device("meta"):
        model = nn.BatchNorm1d(8)
    with pytest.raises(ChunkError, match="expected buffers with values, found running_mean"):
        torch_lms.chunked(*with_optimizer(model), device="cpu")
