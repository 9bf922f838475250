"""The memory that nodes need besides what they keep: measured alone, added up in a stage, and compared with a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.live_bytes import LiveBytes
from torch_lms._torch_compat import has_dispatch_modes
from torch_lms.partition import CostGraph, CostModel, CostNode, DeviceSpec, PartitionProblem
from torch_lms.partition.figures import measure
from torch_lms.partition.working_space import node_space_bytes
from torch_lms.profile import Profile, ProfileConfig, profile, trace

pytestmark = pytest.mark.skipif(not has_dispatch_modes(), reason="this PyTorch has no mode that sees all ops")

ROWS, WIDTH = 64, 128
VALUE = 4 * ROWS * WIDTH
SCALARS = 2048
QUICK = ProfileConfig(warmup_runs=0, timed_runs=1, progress=False, links=False, accumulate=True)


class _Squares(torch.autograd.Function):
    """Makes three temporary values forward, and two backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        kept = [x * x for _ in range(3)]
        return kept[0] + kept[1] - kept[2]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        kept = [gradient * x, gradient * x]
        return kept[0] + kept[1]


class Squares(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Squares.apply(x)
        return result


class Nodes(nn.Module):
    """A product, a view, a place that is written, what keeps its output, and what makes temporary values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.squares = nn.Linear(WIDTH, WIDTH, bias=False), Squares()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.squares(self.layer(x).tanh())
        return y.view(WIDTH, ROWS).mul_(2.0).sum()


def spaces(found: Profile) -> dict[str, tuple[int | None, int | None]]:
    """Forward and backward of each node, in values."""
    return {
        node.target.rpartition(".")[2]: (node.forward_working_bytes, node.backward_working_bytes)
        for node in found.nodes
        if node.op not in ("placeholder", "get_attr", "output")
    }


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_node_needs_what_it_makes_and_does_not_keep(device: str) -> None:
    with torch.device(device):
        model, x = Nodes(), torch.ones(ROWS, WIDTH, requires_grad=True)
    found = spaces(profile(model, x, config=QUICK))
    weight = 4 * WIDTH * WIDTH
    assert found["layer"] == (VALUE, 2 * VALUE + weight)
    assert found["tanh"] == (VALUE, 2 * VALUE)
    assert found["view"] == (0, VALUE)
    assert found["mul_"] == (0, 2 * VALUE)


def test_one_node_may_need_more_than_its_output_and_its_gradient() -> None:
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    graph = torch.fx.Graph()
    graph.output(graph.call_module("squares", (graph.placeholder("x"),)))
    model = nn.Module()
    model.squares = Squares()
    found = spaces(profile(torch.fx.GraphModule(model, graph), x, config=QUICK))
    assert found == {"squares": (5 * VALUE, 4 * VALUE)}


class SharedBias(nn.Module):
    """Blocks that all add one large value, as T5's attention does its bias: its gradient is there through them all."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.rand(1, WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = (self.bias * x).cos()
        for layer in self.layers:
            x = functional.softmax(layer(x) + bias, -1)
        return x.square().mean()


class Residual(nn.Module):
    """A residual stream, and a mask that nothing keeps and all blocks read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x.detach().abs() + 1.0
        for layer in self.layers:
            x = x + functional.relu(layer(functional.layer_norm(x + mask, (WIDTH,))))
        return x.float().square().mean()


@pytest.mark.parametrize("build", [SharedBias, Residual])
def test_a_step_takes_what_its_nodes_say(build: Callable[[], nn.Module]) -> None:
    """A stage that is the whole model, forward and backward, with its gradients there before."""
    torch.manual_seed(0)
    model, x = build(), torch.rand(ROWS, WIDTH, requires_grad=True)
    found = profile(model, x, config=QUICK)
    graph = CostGraph.from_profile(found)
    cost = CostModel(microbatches=1, optimizer_multiplier=2)
    problem = PartitionProblem(graph=graph, devices=(DeviceSpec(name="cpu"),), cost_model=cost)
    figures = measure(problem.units, np.zeros(len(problem.units), dtype=np.int64), problem.devices, [], cost)
    said = figures.stage_memory_bytes[0] - sum(cost.parameter_cost_bytes(graph).values())
    traced = trace(model, (x,))
    assert traced.graph_module is not None
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    x.grad = torch.zeros_like(x)
    live = LiveBytes()
    with live:
        traced.graph_module(x).backward()
    said -= VALUE  # the input is not made in the step
    assert said - VALUE - SCALARS <= live.peak_bytes <= said + SCALARS


def nodes_of(*given: tuple[str, tuple[str, ...], int, dict[str, Any]]) -> CostGraph:
    made = tuple(CostNode(name=name, inputs=inputs, gradient_bytes=size, **more) for name, inputs, size, more in given)
    return CostGraph(nodes=made, storage_bytes={"sa": 100, "sb": 10, "sc": 7})


def measured(forward: int, backward: int, storage: str = "", **more: Any) -> dict[str, Any]:
    own = {"output_storages": (storage,)} if storage else {}
    return {"forward_working_bytes": forward, "backward_working_bytes": backward, **own, **more}


def test_values_that_nothing_keeps_and_gradients_that_are_added_up_stand_beside_a_node() -> None:
    graph = nodes_of(
        ("a", (), 100, measured(1, 1, "sa")),
        ("b", ("a",), 10, measured(2, 3, "sb")),
        ("c", ("b",), 7, measured(4, 5, "sc")),
        ("d", ("a", "c"), 1, measured(0, 0)),
    )
    # While c runs a and b are there; d has added to a's gradient by the time that c's and b's backward run.
    assert node_space_bytes(graph) == {"a": 1, "b": 100 + 3, "c": 110 + 4, "d": 0}


def test_what_is_kept_is_not_counted_twice_nor_the_gradient_of_what_is_only_handed_out() -> None:
    graph = nodes_of(
        ("a", (), 100, measured(1, 1, "sa", saved=("sa",))),
        ("b", ("a",), 10, measured(2, 3, "sb", saved=("sb",))),
        ("pack", ("a", "b"), 110, measured(0, 0, output_storages=("sa", "sb"))),
        ("output", ("pack",), 0, {"kind": "output"}),
    )
    assert node_space_bytes(graph) == {"a": 1, "b": 3, "pack": 0, "output": 0}


def test_piece_by_piece_nothing_of_a_node_stays() -> None:
    model = nn.Sequential(*(layer for _ in range(16) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
    with LiveBytes() as live:
        profile(model, torch.ones(ROWS, WIDTH), config=replace(QUICK, pieces=True))
    assert live.peak_bytes < 16 * VALUE  # all values are 32


def test_what_was_not_measured_needs_its_output_and_its_gradient() -> None:
    graph = nodes_of(("a", (), 100, {"output_bytes": 50}), ("b", ("a",), 10, {"output_bytes": 5}))
    assert node_space_bytes(graph) == {"a": 150, "b": 15}
