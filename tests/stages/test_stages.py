from __future__ import annotations

import copy
import itertools
import operator
import pickle
import traceback
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from tests.partition.random_programs import WIDTH, random_partition, random_program
from torch_lms.errors import PartitionError
from torch_lms.stages.cutting import split
from torch_lms.stages.materialize import materialize
from torch_lms.stages.running import run_stages
from torch_lms.stages.state_dicts import merge_state_dicts


def assert_equal(one: object, other: object) -> None:
    if isinstance(one, torch.Tensor):
        assert isinstance(other, torch.Tensor)
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert isinstance(other, dict)
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_equal(value, other[key])
    elif isinstance(one, (tuple, list)):
        assert isinstance(other, (tuple, list))
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=False):
            assert_equal(left, right)
    else:
        assert one == other


programs = st.tuples(st.integers(0, 10_000), st.integers(4, 30), st.integers(1, 5), st.integers(0, 10_000))


@given(programs)
@settings(max_examples=60, deadline=None)
def test_any_partition_of_any_program_covers_each_node_once_in_order(drawn: tuple[int, int, int, int]) -> None:
    seed, nodes, stages, choice = drawn
    program = random_program(seed, nodes)
    stage_of = random_partition(program.graph, stages, choice)
    made = split(program, stage_of)
    covered = [name for stage in made for name in stage.nodes]
    assert sorted(covered) == sorted(node.name for node in program.graph.nodes if node.op.startswith("call_"))
    assert all(stage_of[name] == stage.index for stage in made for name in stage.nodes)
    available: set[str] = set()
    by_name = {node.name: node for node in program.graph.nodes}
    for stage in made:
        for name in stage.nodes:
            sources = {source.name for source in by_name[name].all_input_nodes if source.op.startswith("call_")}
            assert sources <= available
            available.add(name)
    for before, after in itertools.pairwise(made):
        assert before.outputs == after.inputs


@given(programs)
@settings(max_examples=60, deadline=None)
def test_any_partition_of_any_program_runs_to_the_same_output_and_gradients(drawn: tuple[int, int, int, int]) -> None:
    seed, nodes, stages, choice = drawn
    program = random_program(seed, nodes)
    split_program = copy.deepcopy(program)
    stage_of = random_partition(split_program.graph, stages, choice)
    made = split(split_program, stage_of)
    inputs = [torch.rand(3, WIDTH, generator=torch.Generator().manual_seed(seed)) for _ in range(2)]
    expected, found = program(*inputs), run_stages(made, *inputs)
    assert_equal(expected, found)
    if expected["result"].requires_grad:
        expected["result"].sum().backward()
        found["result"].sum().backward()
    gradients = {name: value.grad for name, value in split_program.named_parameters()}
    for name, value in program.named_parameters():
        assert (value.grad is None) == (gradients[name] is None)
        if value.grad is not None:
            # A partition into intervals keeps the order in which gradients are summed.
            if list(stage_of.values()) == sorted(stage_of.values()):
                assert torch.equal(value.grad, gradients[name])
            else:
                torch.testing.assert_close(value.grad, gradients[name])
    for name, value in program.named_buffers():
        assert torch.equal(value, split_program.get_buffer(name))


@given(programs)
@settings(max_examples=30, deadline=None)
def test_state_dicts_of_stages_merge_into_that_of_the_model(drawn: tuple[int, int, int, int]) -> None:
    seed, nodes, stages, choice = drawn
    program = random_program(seed, nodes)
    made = split(program, random_partition(program.graph, stages, choice), model=program)
    assert_equal(merge_state_dicts(made), dict(program.state_dict()))
    parts = [stage.state_dict() for stage in made]  # as gathered from other processes
    assert_equal(merge_state_dicts(parts), dict(program.state_dict()))


class Tied(nn.Module):
    """Word and output embedding tied, as in GPT; the mean of the inputs skips a layer."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(dropout)) for _ in range(3))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(2, 2)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        x = self.embed(ids)
        skip = x.mean(-1, keepdim=True)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x + skip) * scale


def cut_tied(model: nn.Module, stages: int) -> tuple[fx.GraphModule, dict[str, int]]:
    traced = fx.symbolic_trace(model)
    nodes = [node.name for node in traced.graph.nodes if node.op.startswith("call_")]
    return traced, {name: index * stages // len(nodes) for index, name in enumerate(nodes)}


def test_generated_code_is_readable_with_the_paths_of_modules(tmp_path: Path) -> None:
    stages = split(*cut_tied(Tied(), 3))
    assert stages[1].code == (
        "def forward(self, mean, tanh):\n"
        "    # layers.1.0\n"
        '    layers_1_0 = getattr(getattr(self.layers, "1"), "0")(tanh);  tanh = None\n'
        "    # layers.1.1\n"
        '    layers_1_1 = getattr(getattr(self.layers, "1"), "1")(layers_1_0);  layers_1_0 = None\n'
        "    tanh_1 = torch.tanh(layers_1_1);  layers_1_1 = None\n"
        "    # layers.2.0\n"
        '    layers_2_0 = getattr(getattr(self.layers, "2"), "0")(tanh_1);  tanh_1 = None\n'
        "    # layers.2.1\n"
        '    layers_2_1 = getattr(getattr(self.layers, "2"), "1")(layers_2_0);  layers_2_0 = None\n'
        "    return (mean, layers_2_1)\n"
    )
    stages[1].save_code(tmp_path / "stage.py")
    assert (tmp_path / "stage.py").read_text().endswith(stages[1].code)


def test_names_stay_and_unused_parameters_go_along() -> None:
    model = Tied()
    stages = split(*cut_tied(model, 3), model=model)
    assert "layers.1.0.weight" in dict(stages[1].named_parameters())
    assert merge_state_dicts(stages).keys() == model.state_dict().keys()
    held = [name for stage in stages for name in stage.state_dict()]
    assert sorted(set(held) - {"head.weight", "embed.weight"}) == sorted(
        name for name in held if name not in ("head.weight", "embed.weight")
    )


def test_tied_weights_are_known_on_both_sides_of_the_border() -> None:
    stages = split(*cut_tied(Tied(), 3))
    assert stages[0].shared == {"embed.weight": ((2, "head.weight"),)}
    assert stages[1].shared == {}
    assert stages[2].shared == {"head.weight": ((0, "embed.weight"),)}


def test_a_value_that_skips_a_stage_goes_through_it() -> None:
    stages = split(*cut_tied(Tied(), 3))
    assert "mean" in stages[1].inputs
    assert "mean" in stages[1].outputs
    assert [stage.feeds for stage in stages] == [("ids",), (), ("scale",)]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda stages: pickle.loads(pickle.dumps(stages))])
def test_stages_copy_and_pickle(copied: object) -> None:
    model = Tied()
    ids = torch.arange(6).view(2, 3)
    stages = copied(split(*cut_tied(model, 2)))  # type: ignore[operator]
    assert torch.equal(run_stages(stages, ids, scale=2.0), model(ids, 2.0))


def test_traceback_shows_the_generated_line() -> None:
    stages = split(*cut_tied(Tied(), 2))
    with pytest.raises(RuntimeError) as caught:
        run_stages(stages, torch.ones(2, 3))
    assert "embed = self.embed(ids)" in "".join(traceback.format_tb(caught.value.__traceback__))


class InPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = x * 2
        b = a.sum()
        a.add_(1)
        return a * b


@pytest.mark.parametrize(
    ("stage_of", "valid"),
    [
        ({"mul": 0, "sum_1": 0, "add_": 1, "mul_1": 1}, True),
        ({"mul": 0, "sum_1": 0, "add_": 0, "mul_1": 1}, True),
        ({"mul": 0, "sum_1": 1, "add_": 0, "mul_1": 1}, False),
    ],
)
def test_operations_in_place_keep_their_order(stage_of: dict[str, int], valid: bool) -> None:
    traced = fx.symbolic_trace(InPlace())
    x = torch.arange(3.0)
    if valid:
        assert torch.equal(run_stages(split(traced, stage_of), x), InPlace()(x))
    else:
        with pytest.raises(PartitionError, match=r"sum_1.*add_.*in place"):
            split(traced, stage_of)


def test_a_view_that_is_changed_in_place_behind_a_border_is_refused() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    base = graph.call_function(operator.mul, (x, 2))
    view = graph.call_method("view", (base, -1))
    changed = graph.call_method("add_", (view, 1))
    graph.output(graph.call_function(operator.add, (graph.call_method("sum", (base,)), changed)))
    module = fx.GraphModule(nn.Module(), graph)
    with pytest.raises(PartitionError, match="in place"):
        split(module, {"mul": 0, "view": 0, "add_": 1, "sum_1": 1, "add": 1})


@pytest.mark.parametrize(
    ("stage_of", "message"),
    [
        ({}, "no(ne)? .*stage|stage for each node"),
        ({"mul": 1, "sum_1": 0, "add_": 1, "mul_1": 1}, "order of the graph"),
        ({"mul": 0, "sum_1": 0, "add_": 0, "mul_1": 2}, "at least one node"),
    ],
)
def test_bad_partitions_are_refused(stage_of: dict[str, int], message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        split(fx.symbolic_trace(InPlace()), stage_of)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [((), {}, "'ids'"), ((1, 2, 3), {}, "at most 2"), ((1,), {"ids": 1}, "twice"), ((1,), {"mask": 1}, "'mask'")],
)
def test_bad_arguments_are_refused(args: tuple[int, ...], kwargs: dict[str, int], message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        run_stages(split(*cut_tied(Tied(), 2)), *args, **kwargs)


def test_meta_model_is_materialised_stage_by_stage_from_a_state_dict() -> None:
    model, ids = Tied(), torch.arange(6).view(2, 3)
    meta = Tied().to("meta")
    meta.head.weight = meta.embed.weight
    stages = split(*cut_tied(meta, 3), model=meta)
    state = dict(model.state_dict())
    del state["head.weight"]  # a tied weight under one name is enough
    materialize(stages[0], "cpu", state_dict=state)
    assert all(value.is_meta for value in stages[1].parameters())
    for stage in stages[1:]:
        materialize(stage, "cpu", state_dict=state)
    assert torch.equal(run_stages(stages, ids), model(ids))
    assert meta.embed.weight.is_meta


def test_meta_model_is_initialised_by_its_modules_or_a_function() -> None:
    traced, stage_of = cut_tied(Tied().to("meta"), 2)
    stages = [materialize(stage, "cpu") for stage in split(traced, stage_of)]
    assert all(bool(value.isfinite().all()) for stage in stages for value in stage.parameters())

    def ones(module: nn.Module) -> None:
        for value in module.parameters(recurse=False):
            value.fill_(1)

    stages = [materialize(stage, "cpu", init_fn=ones) for stage in split(traced, stage_of)]
    assert all(bool((value == 1).all()) for stage in stages for value in stage.parameters())


def test_what_nothing_initialises_is_named() -> None:
    program = random_program(1, 4).to("meta")
    graph = fx.Graph()
    graph.output(graph.call_function(operator.mul, (graph.placeholder("x"), graph.get_attr("scale"))))
    (stage,) = split(fx.GraphModule(program, graph), {"mul": 0})
    with pytest.raises(PartitionError, match=r"'scale'.*state_dict.*init_fn"):
        materialize(stage, "cpu")


def test_materialised_stages_share_nothing_with_the_model_where_weights_are_shared() -> None:
    model = Tied()
    stages = [materialize(stage, "cpu") for stage in split(*cut_tied(model, 3), model=model)]
    assert stages[0].embed.weight is not stages[2].head.weight
    assert stages[1].get_parameter("layers.1.0.weight") is model.layers[1][0].weight
    with torch.no_grad():
        stages[0].embed.weight.add_(1)
    with pytest.raises(PartitionError, match="equal in all stages"):
        merge_state_dicts(stages)


@pytest.mark.parametrize(("device", "message"), [("cuda:99", "cuda:99"), ("nowhere", "nowhere")])
def test_a_device_that_is_not_there_is_named(device: str, message: str) -> None:
    (stage,) = split(*cut_tied(Tied(), 1))
    with pytest.raises(PartitionError, match=message):
        materialize(stage, device)


def test_devices_that_a_trace_wrote_down_move_along() -> None:
    graph = fx.Graph()
    made = graph.call_function(torch.ones, (3,), {"device": torch.device("meta")})
    graph.output(graph.call_module("layer", (made,)))
    root = nn.Module()
    root.layer = nn.Linear(3, 3, device="meta")
    (stage,) = split(fx.GraphModule(root, graph), {node.name: 0 for node in graph.nodes})
    assert materialize(stage, "cpu")().device == torch.device("cpu")


def test_batch_norm_may_not_gather_statistics_in_two_stages() -> None:
    graph = fx.Graph()
    first = graph.call_module("norm", (graph.placeholder("x"),))
    graph.output(graph.call_module("norm", (first,)))
    root = nn.Module()
    root.norm = nn.BatchNorm1d(3)
    module = fx.GraphModule(root, graph)
    with pytest.raises(PartitionError, match=r"'norm'.*running statistics"):
        split(module, {"norm": 0, "norm_1": 1})
    x = torch.rand(4, 3)
    module.eval()
    assert torch.equal(run_stages(split(module, {"norm": 0, "norm_1": 1}), x), module(x))


def test_materialised_lstm_runs_on_its_own_weights() -> None:
    graph = fx.Graph()
    graph.output(graph.call_module("lstm", (graph.placeholder("x"),)))
    root = nn.Module()
    root.lstm = nn.LSTM(3, 3)
    expected = root.lstm(torch.ones(2, 1, 3))[0]
    meta = copy.deepcopy(root).to("meta")
    (stage,) = split(fx.GraphModule(meta, graph), {"lstm": 0})
    materialize(stage, "cpu", state_dict=root.state_dict())
    assert torch.equal(stage(torch.ones(2, 1, 3))[0], expected)
    stage(torch.ones(2, 1, 3))[0].sum().backward()
    assert all(value.grad is not None for value in stage.parameters())
    assert all(value.is_meta for value in meta.lstm._flat_weights)
