"""Stages in training and in evaluation do what the model does there, or say that they cannot."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from torch_lms._torch_compat import has_export
from torch_lms.errors import PartitionError
from torch_lms.partition.relief import StageRelief
from torch_lms.profile.constraints import COMPUTED
from torch_lms.profile.tracing import SOURCES, trace, trace_again
from torch_lms.stages import other_mode
from torch_lms.stages.cutting import split
from torch_lms.stages.own_modes import find_own_modes
from torch_lms.stages.running import Stages

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
Body = Callable[[Any, torch.Tensor], torch.Tensor]


class Block(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.5)
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, self.layer(x))


class Model(nn.Module):
    """Layers around a block that is opened, and shares its name with an attribute of a stage."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.shared, self.last = nn.Linear(4, 4), Block(body), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.shared(self.first(x)))
        return found


def drop(self: Any, x: torch.Tensor) -> torch.Tensor:
    return functional.dropout(x, 0.5, self.training)


def drop_in_evaluation(self: Any, x: torch.Tensor) -> torch.Tensor:
    return functional.dropout(x, 0.5, not self.training)


def drop_by_name(self: Any, x: torch.Tensor) -> torch.Tensor:
    return functional.dropout(x, training=self.training, p=0.3)


def drop_always(self: Any, x: torch.Tensor) -> torch.Tensor:
    return functional.dropout(x, 0.5)


def drop_builtin(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.dropout(x, 0.5, self.training)


def leaky(self: Any, x: torch.Tensor) -> torch.Tensor:
    return functional.rrelu(x, training=self.training)


def modules(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.drop(self.norm(x))


def constant(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x * torch.Tensor([2.0]) + torch.Tensor([1.0])


def norm_of_batch(self: Any, x: torch.Tensor) -> torch.Tensor:
    return functional.batch_norm(x, None, None, training=True) + functional.dropout(x, 0.5, self.training)


def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    one = self.norm
    return functional.batch_norm(x, one.running_mean, one.running_var, one.weight, one.bias, self.training)


def attention(self: Any, x: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5 if self.training else 0.0)


def exported_attention(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = x.exp()
    return attention(self, x) + y


def without_gradient(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = self.drop(x)
    return self.norm(self.drop(x)) + y


def branch(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if self.training else x


def other_edge(self: Any, x: torch.Tensor) -> torch.Tensor:
    one, two = x.exp(), x.exp()
    return one + (two if self.training else one)


def exported_branch(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = x.exp()
    return branch(self, x) + y


def branch_in_a_region(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = branch(self, x)
    return x + y


def mode_as_a_constant(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = x.exp()
    return y + x * torch.Tensor([2.0 if self.training else 3.0])


def dropped_always(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = x.exp()
    return functional.dropout(x, 0.5) + y


def attending(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = x[None].exp()
    found: torch.Tensor = self.attention(y, x[None], y)[0][0]
    return found


def cut(model: nn.Module, at: int = 2, sources: Any = SOURCES, **options: Any) -> Stages:
    found = trace(model, (X,), sources=sources)
    assert found.graph_module is not None
    names = [node.name for node in found.graph_module.graph.nodes if node.op in COMPUTED]
    return Stages(split(found, {name: int(place >= at) for place, name in enumerate(names)}, model=model, **options))


def assert_same(stages: nn.Module, model: nn.Module) -> None:
    results = []
    for one in (stages, model):
        one.zero_grad(set_to_none=True)
        torch.manual_seed(3)
        results.append(one(X))
        results[-1].square().sum().backward()
    assert torch.equal(*results)
    found = dict(stages.named_parameters())
    for name, parameter in model.named_parameters():
        gradient = found[name].grad
        assert (gradient is None) == (parameter.grad is None)
        assert gradient is None or torch.equal(gradient, parameter.grad), name
    for name, buffer in model.named_buffers():
        assert torch.equal(stages.get_buffer(name), buffer), name


has_attention = pytest.mark.skipif(
    not hasattr(functional, "scaled_dot_product_attention"), reason="PyTorch 1.12 has no such function"
)
exported = pytest.mark.skipif(not has_export(), reason="this PyTorch does not export models")
IN_BOTH: list[Any] = [
    drop,
    drop_in_evaluation,
    drop_by_name,
    drop_always,
    drop_builtin,
    leaky,
    modules,
    constant,
    norm_of_batch,
]
IN_BOTH += [pytest.param(attention, marks=has_attention)]
IN_BOTH += [pytest.param(exported_attention, marks=[has_attention, exported])]
IN_BOTH += [pytest.param(dropped_always, marks=exported)]
IN_TRAINING: list[Any] = [
    norm,
    pytest.param(without_gradient, marks=exported),
    pytest.param(attending, marks=exported),
]


def in_mode(mode: bool, bodies: list[Any]) -> list[Any]:
    """Each body and its marks, with the mode of the cut."""
    given = [one if hasattr(one, "marks") else pytest.param(one) for one in bodies]
    return [pytest.param(*one.values, mode, marks=one.marks) for one in given]


@pytest.mark.parametrize(("body", "mode"), [*in_mode(True, IN_BOTH + IN_TRAINING), *in_mode(False, IN_BOTH)])
def test_stages_follow_the_mode(body: Body, mode: bool) -> None:
    model = Model(body).train(mode)
    stages = cut(copy.deepcopy(model))
    for now in (mode, not mode, mode):
        assert_same(stages.train(now), model.train(now))


@pytest.mark.parametrize("body", IN_TRAINING)
def test_what_a_trace_of_evaluation_does_not_say_is_refused_in_training(body: Body) -> None:
    model = Model(body).eval()
    stages = cut(copy.deepcopy(model))
    assert_same(stages, model)
    stages.train()
    with pytest.raises(PartitionError, match=r"in evaluation.*found.*in training; call train\(\) on the model"):
        stages(X)


@pytest.mark.parametrize("body", IN_BOTH)
def test_a_part_may_be_in_another_mode(body: Body) -> None:
    model = Model(body)
    stages = cut(copy.deepcopy(model))
    for one in (stages, model):
        one.shared.eval()
    assert_same(stages, model)


IN_ONE: list[Any] = [branch, other_edge]
IN_ONE += [pytest.param(body, marks=exported) for body in (exported_branch, branch_in_a_region, mode_as_a_constant)]


@pytest.mark.parametrize("body", IN_ONE)
@pytest.mark.parametrize("mode", [True, False])
def test_what_computes_otherwise_in_the_other_mode_is_refused_there(body: Body, mode: bool) -> None:
    model = Model(body).train(mode)
    model.shared.norm.train(not mode)
    modes = [module.training for module in model.modules()]
    stages = cut(copy.deepcopy(model))
    cut(model)
    assert [module.training for module in model.modules()] == modes
    assert_same(stages, model)
    stages.train(not mode)
    with pytest.raises(PartitionError, match="in stage 0, as when the model was cut"):
        stages(X)
    stages.train(mode)
    assert_same(stages, model)


def made_otherwise(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if self.training else x * float(x.detach().numpy()[0, 0])


SOURCES_OF_GRAPHS = ["symbolic", "opened", *(["export", "recorded"] if has_export() else [])]


@pytest.mark.parametrize("source", SOURCES_OF_GRAPHS)
@pytest.mark.parametrize("body", [branch, made_otherwise])
def test_a_graph_of_any_source_knows_its_mode(source: str, body: Body) -> None:
    model = Model(body)
    stages = cut(copy.deepcopy(model), sources=[source])
    assert_same(stages, model)
    stages.eval()
    with pytest.raises(PartitionError, match=r"in training in stage 0.*call eval\(\) on the model and cut it again"):
        stages(X)


@pytest.mark.parametrize("source", SOURCES_OF_GRAPHS)
@pytest.mark.parametrize("body", [drop, modules])
def test_a_graph_of_any_source_is_for_both_modes_where_they_do_the_same(source: str, body: Body) -> None:
    model = Model(body)
    stages = cut(copy.deepcopy(model), sources=[source])
    for mode in (True, False, True):
        assert_same(stages.train(mode), model.train(mode))


@pytest.mark.parametrize("body", [drop, norm_of_batch, pytest.param(attention, marks=has_attention)])
def test_segments_that_are_computed_again_follow_the_mode(body: Body) -> None:
    model = Model(body)
    found = trace(model, (X,)).graph_module
    assert found is not None
    names = [node.name for node in found.graph.nodes if node.op in COMPUTED]
    relief = [StageRelief(), StageRelief(recomputed=(tuple(names[2:]),))]
    stages = cut(copy.deepcopy(model), relief=relief)
    for mode in (True, False):
        assert_same(stages.train(mode), model.train(mode))


def test_a_trace_is_looked_at_in_the_other_mode_once(monkeypatch: pytest.MonkeyPatch) -> None:
    again: list[Any] = []

    def counted(traced: Any) -> Any:
        again.append(traced)
        return trace_again(traced)

    monkeypatch.setattr(other_mode, "trace_again", counted)
    traced = trace(Model(drop), [X])
    assert traced.graph_module is not None
    names = [node.name for node in traced.graph_module.graph.nodes if node.op.startswith("call")]
    for at in range(1, 4):
        split(traced, {name: int(place >= at) for place, name in enumerate(names)})
    assert len(again) == 1
    traced.model.eval()
    split(traced, dict.fromkeys(names, 0))
    assert len(again) == 2


@pytest.mark.parametrize("body", [modules, pytest.param(without_gradient, marks=exported)])
def test_what_is_frozen_stays_so(body: Body) -> None:
    model = Model(body)
    model.shared.norm.eval()
    stages = cut(copy.deepcopy(model))
    assert not stages.shared.norm.training
    assert_same(stages, model)


class OwnTrain(Model):
    """Its `train` and that of its block do more than others'."""

    def __init__(self, body: Body, also: Callable[[Any, bool], None]) -> None:
        super().__init__(body)
        self.shared = OwnTrainOfBlock(body, also)

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.last.eval()
        return self


class OwnTrainOfBlock(Block):
    def __init__(self, body: Body, also: Callable[[Any, bool], None]) -> None:
        super().__init__(body)
        self.also, self.scale, self.facts = also, 1.0, {"rates": [0.5]}
        self.slotted, self.queue = Slotted(), deque([0.5])

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.also(self, mode)
        return self


def keep_norm(self: Any, _: bool) -> None:
    self.norm.eval()
    self.norm.weight.requires_grad = False


def dropped(self: Any, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = self.drop(x)
    return found


def always_drop(self: Any, _: bool) -> None:
    self.drop.train()


@pytest.mark.parametrize("source", SOURCES_OF_GRAPHS)
@pytest.mark.parametrize(
    ("body", "also", "mode"),
    [
        (modules, keep_norm, True),
        (modules, keep_norm, False),
        (norm, keep_norm, True),
        (dropped, always_drop, True),
        (dropped, always_drop, False),
    ],
)
def test_stages_follow_the_models_own_train(
    source: str, body: Body, also: Callable[[Any, bool], None], mode: bool
) -> None:
    model = OwnTrain(body, also).train(mode)
    stages = cut(copy.deepcopy(model), sources=[source])
    for now in (mode, not mode, mode):
        assert_same(stages.train(now), model.train(now))
        found = dict(stages.named_modules())
        assert all(found[path].training == one.training for path, one in model.named_modules() if path in found)
    for one in (stages, model):
        one.eval()
        one.shared.train(mode)
    assert_same(stages, model)


def set_attribute(self: Any, mode: bool) -> None:
    self.scale = 2.0 if mode else 1.0


def write_to_a_list(self: Any, mode: bool) -> None:
    self.facts["rates"][0] = float(mode)


class Slotted:
    __slots__ = ("rate",)

    def __init__(self) -> None:
        self.rate = 0.5


def write_to_a_slot(self: Any, mode: bool) -> None:
    self.slotted.rate = float(mode)


def write_to_a_queue(self: Any, mode: bool) -> None:
    self.queue[0] = float(mode)


def write_to_data(self: Any, mode: bool) -> None:
    self.layer.weight.data.mul_(2.0 if mode else 0.5)


def thaw(self: Any, mode: bool) -> None:
    self.layer.weight.requires_grad_(mode)


@pytest.mark.parametrize(
    ("also", "text"),
    [
        (set_attribute, "changes 'shared.scale'"),
        (write_to_a_list, "changes 'shared.facts.rates.0'"),
        (write_to_a_slot, "changes 'shared.slotted.rate'"),
        (write_to_a_queue, "changes 'shared.queue.0'"),
        (write_to_data, r"computes, by .*"),
        (thaw, "changes 'shared.layer.weight'"),
    ],
)
@pytest.mark.parametrize("mode", [True, False])
def test_what_a_models_own_train_does_beside_is_refused_in_the_other_mode(
    also: Callable[[Any, bool], None], text: str, mode: bool
) -> None:
    model = OwnTrain(modules, also).train(mode)
    before = copy.deepcopy(model)
    stages = cut(model)
    assert_same(stages, before)
    assert (model.shared.scale, model.shared.facts) == (before.shared.scale, before.shared.facts)
    found = f"since train\\(\\) or eval\\(\\) of OwnTrain or OwnTrainOfBlock {text}, found it in"
    for turned in (stages, stages.shared):
        turned.train(not mode)
        with pytest.raises(PartitionError, match=found):
            stages(X)
        turned.train(mode)
    assert_same(stages, before)


def set_grad_mode(self: Any, mode: bool) -> None:
    torch.set_grad_enabled(mode)


def test_to_try_a_models_own_train_leaves_the_program_as_it_was() -> None:
    model = OwnTrain(modules, set_grad_mode).eval()
    torch.set_grad_enabled(True)
    cut(model)
    assert torch.is_grad_enabled()


def test_to_try_a_models_own_train_copies_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(tensor: torch.Tensor, memo: Any) -> torch.Tensor:
        raise AssertionError(f"{tensor} is copied")

    model = OwnTrain(modules, keep_norm).train()
    model.shared.facts["cached"] = [torch.zeros(3), {"more": torch.ones(2)}]
    monkeypatch.setattr(torch.Tensor, "__deepcopy__", refuse)
    assert not find_own_modes(model, []).reason


def test_a_models_own_train_is_not_tried_where_the_model_holds_too_much() -> None:
    model = OwnTrain(modules, keep_norm).train()
    model.shared.facts["vocabulary"] = [[number] for number in range(100_000)]
    assert "more than 100000 values" in find_own_modes(model, []).reason
