"""Stages in training and in evaluation do what the model does there, or say that they cannot."""

from __future__ import annotations

import copy
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
