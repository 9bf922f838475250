"""The gradients that wait for the backward of weights, against those that torch.distributed.pipelining keeps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from torch_lms.partition import CostGraph
from torch_lms.partition.units import Units
from torch_lms.partition.weight_gradients import WeightGradients
from torch_lms.pipeline.torch_backend import is_available
from torch_lms.profile import NodeProfile, Profile, ProfileConfig, profile

WIDTH, ROWS = 8, 6
VALUE = 4 * ROWS * WIDTH


class Behind(nn.Module):
    """A module behind a layer, so that gradients go through it to what came in."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(self.first(x))
        return found


class Deep(nn.Module):
    """Several weights inside of what is one node where modules are nodes, two of them made of others first."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.LayerNorm(3 * WIDTH)
        self.scale = nn.Parameter(torch.ones(3 * WIDTH))
        self.shift = nn.Parameter(torch.ones(3 * WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(self.norm(self.up(x))) * (self.scale * self.shift.exp())


class Tied(nn.Module):
    """A value meets a view of a weight, which is another node."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


class Recurrent(nn.Module):
    """One node of the graph with two layers inside."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.lstm(x)[0]
        return found


def node_of(found: Profile, name: str) -> NodeProfile:
    return next(node for node in found.nodes if node.name == name)


def kept_by_torch(module: nn.Module, x: torch.Tensor) -> int:
    from torch.distributed.pipelining._backward import stage_backward_input

    entering = x.clone().requires_grad_()
    output = module(entering) * 1.0  # no view, which it cannot detach
    _, groups = stage_backward_input([output], [torch.randn_like(output)], [entering], module.parameters())
    kept = {node: grads for one in groups for node, grads in zip(one["intermediates"], one["grads"], strict=True)}
    return sum(one.numel() * one.element_size() for grads in kept.values() for one in grads if one is not None)


@pytest.mark.skipif(not is_available(), reason="it is torch.distributed.pipelining that keeps them")
@pytest.mark.parametrize(
    ("make", "nbytes"),
    [
        (lambda: nn.Linear(WIDTH, 2 * WIDTH), 2 * VALUE),
        (lambda: nn.LayerNorm(WIDTH), VALUE),
        (nn.GELU, 0),
        (lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False), 0),
        (lambda: nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, dropout=0.0), (3 + 1 + 1 + 4 + 1 + 1) * VALUE),
        (Deep, (3 + 3 + 3) * VALUE),
        (Tied, 2 * VALUE),
    ],
    ids=["linear", "norm", "no weights", "frozen", "a whole layer", "weights made of weights", "a view of a weight"],
)
@pytest.mark.parametrize("pieces", [False, True])
def test_gradients_that_are_kept_are_those_of_torch(make: Callable[[], nn.Module], nbytes: int, pieces: bool) -> None:
    """In a stage that begins with the inner module."""
    model, x = Behind(make), torch.randn(ROWS, WIDTH)
    found = profile(model, x, config=ProfileConfig(warmup_runs=0, timed_runs=1, progress=False, pieces=pieces))
    units = Units(CostGraph.from_profile(found))
    placed = np.array([int(node.module.startswith("inner")) for node in units.nodes])
    meetings = WeightGradients(units, placed).meetings()
    assert sum(one.nbytes for one in meetings if one.after < one.at <= one.until) == nbytes
    assert kept_by_torch(model.inner, x) == nbytes


@pytest.mark.skipif(not is_available(), reason="this PyTorch has no zero bubble, and does not say what nodes get")
def test_a_node_with_several_layers_keeps_the_gradients_of_each() -> None:
    """And those of the states that it returns, though nothing here reads them."""
    model, x = Behind(Recurrent), torch.randn(ROWS, WIDTH)
    node = node_of(profile(model, x, config=ProfileConfig(warmup_runs=0, timed_runs=1)), "inner_lstm")
    states = 2 * 2 * 4 * WIDTH
    assert kept_by_torch(model.inner, x) == 2 * VALUE > node.gradient_bytes - states
    assert node.kept_gradient_bytes == 2 * VALUE + states


def test_where_no_gradient_goes_on_none_is_kept() -> None:
    """The first layer's inputs need none: its whole backward is one of weights."""
    found = profile(Behind(nn.GELU), torch.randn(ROWS, WIDTH), config=ProfileConfig(warmup_runs=0, timed_runs=1))
    assert node_of(found, "first").kept_gradient_bytes == 0
    wanting = torch.randn(ROWS, WIDTH, requires_grad=True)
    found = profile(Behind(nn.GELU), wanting, config=ProfileConfig(warmup_runs=0, timed_runs=1))
    assert node_of(found, "first").kept_gradient_bytes == VALUE
