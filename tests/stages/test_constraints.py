"""Models that work in place: whatever an algorithm cuts can be made into stages, and these do what the model does."""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch.nn import functional as F  # noqa: N812  # PyTorch's own name for it

from tests.partition.random_writes import ROWS, WIDTH, Root, assert_same, outcome, problem_of, random_writes
from tests.stages.test_balanced import QUICK
from torch_lms.balanced import create_balanced_partition
from torch_lms.errors import PartitionError
from torch_lms.partition import algorithm_names, partition
from torch_lms.profile.random_draws import draws
from torch_lms.profile.tracing import trace
from torch_lms.stages.cutting import split
from torch_lms.stages.mutations import check_order
from torch_lms.stages.running import run_stages
from torch_lms.stages.stage import Stage


def run_apart(stages: Sequence[Stage], feeds: dict[str, Any]) -> Any:
    """Runs stages as a pipeline does: each value that crosses a border is a tensor of its own behind it."""
    result: Any = ()
    for stage in stages:
        values = (result,) if len(stage.inputs) == 1 else result
        values = [value.clone() if isinstance(value, torch.Tensor) else value for value in values]
        result = stage(*values, **{name: feeds[name].clone() for name in stage.feeds})
    return result


def with_own_buffers(stages: Sequence[Stage]) -> list[Stage]:
    """Copies of stages, each with buffers that no other stage has; the parameters stay."""
    return [copy.deepcopy(stage, {id(parameter): parameter for parameter in stage.parameters()}) for stage in stages]


drawn = st.tuples(st.integers(0, 100_000), st.integers(4, 26), st.integers(2, 4), st.sampled_from(algorithm_names()))


@given(drawn)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
def test_what_algorithms_make_of_programs_that_work_in_place_can_be_cut_and_runs(drawn: Any) -> None:
    seed, nodes, stages, algorithm = drawn
    program = random_writes(seed, nodes)
    generator = torch.Generator().manual_seed(seed)
    feeds = {name: torch.rand(ROWS, WIDTH, generator=generator) for name in ("x", "y")}
    model = copy.deepcopy(program)

    def run_model() -> Any:
        return fx.Interpreter(model).run(*(value.clone() for value in feeds.values()))

    try:
        expected = outcome(run_model, list(model.parameters()))
    except RuntimeError:  # autograd refuses some changes of what it has saved
        assume(False)
    try:
        problem = problem_of(program, stages, seed)
    except PartitionError:  # more stages than units
        assume(False)
    made = partition(problem, algorithm)
    stage_of = {node.name: made.stage_of[node.name] for node in program.graph.nodes if node.op.startswith("call_")}
    cut = split(program, stage_of)
    in_order = list(stage_of.values()) == sorted(stage_of.values())

    apart = with_own_buffers(cut)
    assert_same(outcome(lambda: run_apart(apart, feeds), list(program.parameters())), expected, exact=in_order)
    whole = outcome(
        lambda: run_stages(cut, **{name: value.clone() for name, value in feeds.items()}), list(program.parameters())
    )
    assert_same(whole, expected, exact=True)
    for name, buffer in model.named_buffers():
        assert torch.equal(program.get_buffer(name), buffer)


def cut_by(program: fx.GraphModule, algorithm: str, stages: int = 2) -> dict[str, int]:
    made = partition(problem_of(program, stages, seed=0), algorithm)
    return {node.name: made.stage_of[node.name] for node in program.graph.nodes if node.op.startswith("call_")}


def filled_in_place() -> fx.GraphModule:
    """As experts are mixed on a GPU: a new tensor, filled through a view, then bounded in place and read."""
    graph = fx.Graph()
    first = graph.call_module("layers.0", (graph.placeholder("x"),))
    empty = graph.call_function(torch.ops.aten.empty_like.default, (first,))
    view = graph.call_function(torch.ops.aten.view.default, (empty, [-1]))
    graph.call_function(torch.ops.aten.copy_.default, (view, graph.call_method("flatten", (first,))))
    busy = graph.call_module("layers.1", (first,))
    graph.call_function(torch.ops.aten.clamp_.default, (empty,), {"max": 0.5})
    graph.output({"result": graph.call_function(operator.add, (busy, empty)), "more": ()})
    return fx.GraphModule(Root(0), graph)


@pytest.mark.parametrize("algorithm", algorithm_names())
def test_a_tensor_that_is_filled_through_a_view_is_filled_in_one_stage(algorithm: str) -> None:
    program = filled_in_place()
    x = torch.rand(ROWS, WIDTH)
    expected = program(x)["result"]
    stage_of = cut_by(program, algorithm)
    assert stage_of["view_default"] == stage_of["copy__default"] <= stage_of["clamp__default"]
    assert set(stage_of.values()) == {0, 1}
    assert torch.equal(run_apart(split(program, stage_of), {"x": x})["result"], expected)


def test_a_tensor_that_is_filled_through_a_view_in_an_earlier_stage_is_refused() -> None:
    program = filled_in_place()
    names = [node.name for node in program.graph.nodes if node.op.startswith("call_")]
    late = {name: int(name in ("clamp__default", "add")) for name in names}
    assert split(program, late)  # all of it crosses as one tensor
    with pytest.raises(PartitionError, match=r"'copy__default' works in place on memory that they share"):
        split(program, {**late, "copy__default": 1})


@pytest.mark.parametrize("algorithm", algorithm_names())
def test_calls_of_one_batch_norm_stay_together(algorithm: str) -> None:
    graph = fx.Graph()
    value = graph.placeholder("x")
    for name in ("layers.0", "norm", "layers.1", "norm", "layers.0", "layers.1"):
        value = graph.call_module(name, (value,))
    graph.output(value)
    program = fx.GraphModule(Root(0), graph)
    stage_of = cut_by(program, algorithm)
    assert stage_of["norm"] == stage_of["layers_1"] == stage_of["norm_1"]
    assert split(program, stage_of)


class Answer(dict):  # type: ignore[type-arg]
    """What a model returns, as transformers make it."""


def test_what_is_made_to_be_returned_is_made_in_the_last_stage() -> None:
    graph = fx.Graph()
    early = graph.call_module("layers.0", (graph.placeholder("x"),))
    answer = graph.call_function(Answer, (), {"logits": early})
    graph.output((answer, graph.call_module("layers.1", (early,))))
    program = fx.GraphModule(Root(0), graph)
    for algorithm in algorithm_names():
        assert cut_by(program, algorithm)["answer"] == 1
    with pytest.raises(PartitionError, match="'answer', which makes what the model returns, in the last stage"):
        split(program, {"layers_0": 0, "answer": 0, "layers_1": 1})


def test_a_view_of_a_value_is_no_bar_where_nothing_is_written() -> None:
    graph = fx.Graph()
    first = graph.call_module("layers.0", (graph.placeholder("x"),))
    turned = graph.call_method("t", (first,))
    graph.output(graph.call_function(operator.add, (first, graph.call_method("t", (turned,)))))
    program = fx.GraphModule(Root(0), graph)
    assert all(not node.not_before for node in problem_of(program, 2, 0).graph.nodes)


def test_a_residual_stream_that_is_added_to_in_place_can_still_be_cut_everywhere() -> None:
    graph = fx.Graph()
    stream = graph.call_module("layers.0", (graph.placeholder("x"),))
    for _ in range(6):
        branch = graph.call_module("layers.1", (graph.call_function(torch.tanh, (stream,)),))
        stream = graph.call_method("add_", (stream, branch))
    graph.output(stream)
    program = fx.GraphModule(Root(0), graph)
    problem = problem_of(program, 2, 0)
    assert len(problem.units) == sum(node.op.startswith("call_") for node in graph.nodes)


class Noisy(nn.Module):
    """Draws beside what it draws for, and in branches that do not know of each other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for layer in self.layers[:3]:
            x = F.dropout(layer(x), 0.3) + torch.rand(8)
        for layer in self.layers[3:]:
            y = self.dropout(layer(y)) * torch.ones(8).bernoulli_(0.5)
        return x + y


@pytest.mark.parametrize("algorithm", algorithm_names())
def test_stages_draw_the_random_numbers_of_the_model(algorithm: str) -> None:
    torch.manual_seed(0)
    model, x = Noisy(), torch.randn(4, 8)
    for stages in (2, 3):
        made = create_balanced_partition(model, ["cpu"] * stages, x, algorithm=algorithm, config=QUICK)
        torch.manual_seed(1)
        expected = model(x)
        torch.manual_seed(1)
        assert torch.equal(made(x), expected)


def test_what_draws_first_is_not_put_into_a_later_stage() -> None:
    traced = trace(Noisy(), (torch.randn(4, 8),))
    nodes = [node for node in traced.graph_module.graph.nodes if node.op.startswith("call_")]
    drawing = [node for node in nodes if draws(node, dict(traced.graph_module.named_modules()))]
    assert len(drawing) == 12
    stage_of = dict.fromkeys(traced.graph_module.graph.nodes, 1)
    stage_of[drawing[5]] = 0
    with pytest.raises(PartitionError, match="both draw random numbers"):
        check_order(traced.graph_module.graph, dict(traced.graph_module.named_modules()), stage_of)
