"""Stages in one process: ``cpu:1`` is a device of its own to PyTorch, so that values are copied to it and back."""

from __future__ import annotations

import copy
import operator
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from torch_lms._torch_compat import has_export
from torch_lms.balanced import BalanceConfig, create_balanced_partition
from torch_lms.errors import PartitionError
from torch_lms.partition.costs import CostModel
from torch_lms.partition.link_spec import LinkSpec
from torch_lms.profile.profiler import ProfileConfig
from torch_lms.profile.tracing import trace
from torch_lms.stages import running
from torch_lms.stages.cutting import split
from torch_lms.stages.materialize import materialize
from torch_lms.stages.placement import Placement
from torch_lms.stages.running import Stages, run_stages
from torch_lms.stages.stage import Stage

QUICK = BalanceConfig(profile=ProfileConfig(warmup_runs=0, timed_runs=1, progress=False), links=LinkSpec())
IDS = torch.arange(12).view(3, 4) % 11
TARGETS = IDS.flip(0)


class Small(nn.Module):
    """Weights tied at both ends, a buffer that counts, a norm with statistics, and ids that two ends use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(2, 2)

    def forward(self, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        x = self.embed(ids)
        skip = x + torch.arange(ids.shape[1], device=ids.device)[:, None]
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = self.norm((x + skip).transpose(1, 2)).transpose(1, 2)
        return self.head(x) * scale + ids[..., None]


def made(devices: list[str], model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, Stages]:
    torch.manual_seed(0)
    model = model or Small()
    return model, create_balanced_partition(copy.deepcopy(model), devices, IDS, config=QUICK, **options)


def train(module: nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = functional.cross_entropy(module(IDS).flatten(0, 1), TARGETS.flatten())
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


DEVICES = [["cpu"], ["cpu", "cpu"], ["cpu", "cpu:1"], ["cpu:1", "cpu", "cpu:1"]]


@pytest.mark.parametrize("devices", DEVICES)
def test_one_backward_gives_the_model_s_own_gradients_bit_by_bit(devices: list[str]) -> None:
    model, stages = made(devices)
    for module in (model, stages):
        module(IDS).square().mean().backward()
    expected = {name: value.grad for name, value in model.named_parameters()}
    found = {name: value.grad for name, value in stages.named_parameters()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] is None) == (gradient is None), name
        assert gradient is None or torch.equal(gradient, found[name]), name


@pytest.mark.parametrize("devices", DEVICES)
def test_stages_train_as_the_model_does(devices: list[str]) -> None:
    model, stages = made(devices)
    assert train(stages, 3) == train(model, 3)
    expected, found = model.state_dict(), stages.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name
    assert stages.head.weight is stages.embed.weight


@pytest.mark.skipif(not hasattr(torch, "export"), reason="PyTorch 1.12 has no batch norm on the meta device")
def test_values_move_to_the_device_of_each_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[tuple[int, Any]] = []
    original = running.to_stage

    def to_stage(value: Any, stage: Stage) -> Any:
        moved.append((stage.index, getattr(value, "device", None)))  # sizes may cross, too
        return original(value, stage)

    _, stages = made(["cpu", "meta"])
    monkeypatch.setattr(running, "to_stage", to_stage)
    found = stages(IDS)
    assert found.is_meta
    assert found.shape == (3, 4, 11)
    cpu = torch.device("cpu")
    assert {index for index, device in moved if device == cpu} == {0, 1}
    assert sum(index == 1 for index, _ in moved) == len(stages[1].inputs + stages[1].feeds) + 1  # and the tied weight
    assert not stages.embed.weight.is_meta


@pytest.mark.skipif(not hasattr(torch, "export"), reason="PyTorch 1.12 has no batch norm on the meta device")
def test_a_device_that_crosses_a_border_is_that_of_the_stage() -> None:
    model = Small()
    traced = trace(model, (IDS,), {})
    assert traced.graph_module is not None
    names = [node.name for node in traced.graph_module.graph.nodes if node.op.startswith("call_")]
    first = next(place for place, name in enumerate(names) if name.startswith("arange"))
    stages = split(traced, {name: int(place >= first) for place, name in enumerate(names)}, model=model)
    assert "device" in stages[0].code
    assert "device" in stages[1].code
    for stage, device in zip(stages, ("cpu", "meta"), strict=True):
        materialize(stage, device)
    assert run_stages(stages, IDS).is_meta


def test_a_buffer_that_two_stages_read_is_one() -> None:
    root, graph = nn.Module(), torch.fx.Graph()
    root.register_buffer("offset", torch.ones(3))
    once = graph.call_function(operator.add, (graph.placeholder("x"), graph.get_attr("offset")))
    graph.output(graph.call_function(operator.mul, (once, graph.get_attr("offset"))))
    stages = split(torch.fx.GraphModule(root, graph), {"add": 0, "mul": 1})
    for stage, device in zip(stages, ["cpu", "meta"], strict=True):
        materialize(stage, device)
    whole = Stages(stages)
    assert whole(torch.ones(3)).is_meta
    assert torch.equal(whole.offset, torch.ones(3))
    assert stages[1].offset is whole.offset


def test_parameters_come_in_the_order_of_the_model() -> None:
    """As optimizers number their state."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(12)))
    stages = create_balanced_partition(model, ["cpu"] * 3, torch.ones(2, 4), config=QUICK)
    assert [name for name, _ in stages.named_parameters()] == [name for name, _ in model.named_parameters()]


def test_it_is_a_sequence_of_stages() -> None:
    _, stages = made(["cpu", "cpu:1"])
    assert [stage.index for stage in stages] == list(range(len(stages))) == [0, 1]
    assert stages[-1] is stages[1:][0]
    assert [stage.device for stage in stages] == [torch.device("cpu"), torch.device("cpu", 1)]
    assert [stage.placement for stage in stages] == [Placement(torch.device(name)) for name in ("cpu", "cpu:1")]
    assert "2 stages on cpu, cpu:1" in repr(stages)


def test_state_of_the_model_loads_and_copies_stay_apart() -> None:
    model, stages = made(["cpu", "cpu:1"])
    twin, pickled = copy.deepcopy(stages), pickle.loads(pickle.dumps(stages))
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(0.5)
    before = twin(IDS)
    stages.load_state_dict(model.state_dict())
    assert torch.equal(stages(IDS), model(IDS))
    assert torch.equal(pickled(IDS), before)
    assert not torch.equal(stages(IDS), before)


def test_modes_and_types_reach_all_stages() -> None:
    model, stages = made(["cpu", "cpu:1"])
    stages.eval().double()
    assert not any(module.training for stage in stages for module in stage.modules())
    assert stages(IDS).dtype == torch.float64
    assert torch.equal(stages(IDS), model.eval().double()(IDS))
    assert stages.head.weight is stages.embed.weight
    assert stages.to("cpu")[1].device == torch.device("cpu")
    stages.to("meta")
    assert not hasattr(torch, "export") or stages(IDS).is_meta  # PyTorch 1.12 has no batch norm there
    assert all(value.is_meta for value in (*stages.parameters(), *stages[1].buffers()))


def test_stages_of_other_ranks_are_not_run_here() -> None:
    _, stages = made(["cpu", "rank:1/cpu"])
    with pytest.raises(PartitionError, match=r"found stage 1 on rank:1/cpu; train with torch_lms\.pipeline\.Pipeline"):
        stages(IDS)
    own = {name for name, _ in stages[0].named_parameters()}
    assert {name for name, _ in stages.named_parameters()} == own


def test_plan_and_stages_know_schedule_and_microbatches_once() -> None:
    cost = CostModel(schedule="gpipe", microbatches=3)
    config = BalanceConfig(profile=QUICK.profile, cost=cost)
    stages = create_balanced_partition(Small(), ["cpu", "cpu"], IDS, config=config)
    assert stages.cost is cost


def test_stages_that_were_only_cut_run_where_the_model_is() -> None:
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    names = [node.name for node in graph.graph.nodes if node.op == "call_module"]
    cut = split(graph, {name: index for index, name in enumerate(names)})
    x = torch.ones(2, 4)
    assert torch.equal(run_stages(cut, x), graph(x))
    assert torch.equal(Stages(cut)(x), graph(x))
    assert Stages(cut).state_dict().keys() == graph.state_dict().keys()


class Answer(dict[str, torch.Tensor]):
    """What some models return: its items are attributes, too."""

    def __getattr__(self, name: str) -> torch.Tensor:
        return self[name]


class Answering(nn.Module):
    def __init__(self, kind: type[dict[str, Any]], unseen: bool) -> None:
        super().__init__()
        self.first, self.second, self.kind, self.unseen = nn.Linear(4, 4), nn.Linear(4, 2), kind, unseen

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        hidden = self.first(x)
        if self.unseen:  # a graph of torch.export: torch.fx cannot read a value
            with torch.no_grad():
                hidden = hidden + x.softmax(-1)
        return self.kind(logits=self.second(hidden), hidden=hidden)


@pytest.mark.parametrize("unseen", [False, *([True] if has_export() else [])])
@pytest.mark.parametrize("kind", [Answer, OrderedDict, dict])
def test_outputs_are_mappings_of_the_model_s_own_type(kind: type[dict[str, Any]], unseen: bool) -> None:
    x = torch.randn(3, 4)
    model = Answering(kind, unseen)
    found = create_balanced_partition(model, ["cpu", "cpu"], x, config=QUICK)(x)
    expected = model(x)
    assert type(found) is kind
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
