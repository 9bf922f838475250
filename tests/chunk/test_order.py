"""Tensors lie in the order in which a program says that it uses them; results are the same in any."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
from torch import nn

import torch_lms
from tests.chunk.plain import Chunked, Plain, same, train
from tests.chunk.test_chunked import ADAMW
from tests.unit.trainings import one_thread, vector_batch
from torch_lms.chunk import order_of_use

Order = Callable[[nn.Module], Iterable[nn.Parameter]]


class Parallel(nn.Module):
    """Layers of two kinds, in a list for each kind, that take turns; one layer nobody uses."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last = nn.Linear(512, 512)
        self.spare = nn.Linear(4, 4)
        self.wide = nn.ModuleList(nn.Linear(512, 512) for _ in range(layers))
        self.narrow = nn.ModuleList(nn.Sequential(nn.Linear(512, 8), nn.Linear(8, 512)) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for wide, narrow in zip(self.wide, self.narrow, strict=True):
            x = x + narrow(torch.tanh(wide(x)))
        return self.last(x)


def reverse(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())[::-1]


def as_used(model: nn.Module) -> list[nn.Parameter]:
    return order_of_use(model, torch.zeros(1, 512, device=next(model.parameters()).device))


def chunked(order: Order | None = None) -> Chunked:
    model = Parallel()
    return Chunked(model, ADAMW, chunk_numel=1 << 18, order=None if order is None else order(model))


def names_of(model: nn.Module, parameters: Iterable[nn.Parameter]) -> list[str]:
    names = {one: name for name, one in model.named_parameters()}
    return [names[one].rpartition(".")[0] for one in parameters if names[one].endswith("weight")]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_one_call_finds_out_which_units_come_first(device: str) -> None:
    with torch.device(device):
        model = Parallel(layers=2)
    found = names_of(model, as_used(model))
    assert found == ["wide.0", "narrow.0.0", "narrow.0.1", "wide.1", "narrow.1.0", "narrow.1.1", "last"]
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_call_that_fails_leaves_no_hooks() -> None:
    model = Parallel(layers=2)
    with pytest.raises(RuntimeError):
        order_of_use(model, torch.zeros(1, 3))
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_tensors_lie_in_the_order_that_is_given_and_the_others_behind_them() -> None:
    training = chunked(as_used)
    data = training.optimizer.data
    names = names_of(training.model, (one.parameter for one in data.tensors))
    expected = [
        f"{kind}.{n}{part}" for n in range(4) for kind, part in [("wide", ""), ("narrow", ".0"), ("narrow", ".1")]
    ]
    assert names == [*expected, "last", "spare"]
    places = [(place.chunk, place.offset) for place in data.layout.places]
    assert places == sorted(places)


@one_thread()
@pytest.mark.parametrize("order", [reverse, as_used])
def test_training_in_another_order_is_bit_equal(order: Order) -> None:
    expected = train(Plain(Parallel(), ADAMW), vector_batch, 3)
    training = chunked(order)
    assert all(map(same, train(training, vector_batch, 3), expected))


@one_thread()
def test_states_go_from_one_order_to_another() -> None:
    training, other = chunked(), chunked(reverse)
    list(train(training, vector_batch, 2))
    other.model.load_state_dict(training.model.state_dict())
    other.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
    assert all(map(same, train(training, vector_batch, 2), train(other, vector_batch, 2)))


def test_parameters_of_others_are_refused_before_anything_changes() -> None:
    model = Parallel()
    make = partial(torch_lms.chunked, model, ADAMW(model.parameters()))
    with pytest.raises(torch_lms.errors.ChunkError, match=r"found 2 others \(one of shape \(3, 3\)"):
        make(order=[*model.parameters(), *nn.Linear(3, 3).parameters()])
    assert {one.dtype for one in model.parameters()} == {torch.float32}
    make(order=model.last.parameters())
