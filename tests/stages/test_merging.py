"""What is set in `Stages` is what its stages compute with, and all of it is in the model's order."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from torch_lms.errors import PartitionError
from torch_lms.pipeline.states import names_of
from torch_lms.profile.constraints import COMPUTED
from torch_lms.profile.tracing import trace
from torch_lms.stages.cutting import split
from torch_lms.stages.materialize import materialize
from torch_lms.stages.running import Stages, run_stages
from torch_lms.stages.state_dicts import merge_state_dicts

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    """Is opened, so that its parameters may be in several stages."""

    def __init__(self) -> None:
        super().__init__()
        self.late, self.early = nn.Linear(4, 4), nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.rand(4))
        self.register_buffer("shift", torch.rand(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.late(self.early(x).tanh() * self.gain) + self.shift


class Mixed(nn.Module):
    """Used in another order than it is made: a module called twice, and one that is called and read."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.twice = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.read = nn.Linear(4, 4)
        self.block = Block()
        self.scale = nn.Parameter(torch.rand(4))
        self.unused = nn.Parameter(torch.rand(2))
        self.register_buffer("offset", torch.rand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.twice(self.read(x))) * self.scale
        x = self.block(x) + self.offset
        x = functional.linear(self.twice(self.drop(x)), self.read.weight)
        return self.head(x)


def cut_everywhere(model: nn.Module, *, own: bool = True) -> Stages:
    """A stage for each node that computes."""
    found = trace(model, (X,))
    assert found.graph_module is not None
    names = [node.name for node in found.graph_module.graph.nodes if node.op in COMPUTED]
    stages = split(found, {name: place for place, name in enumerate(names)}, model=model)
    return Stages([materialize(stage, "cpu") for stage in stages] if own else stages)


def other(seed: int = 5) -> Mixed:
    torch.manual_seed(seed)
    return Mixed().eval()


def load(stages: Stages, values: Mixed) -> None:
    stages.load_state_dict(values.state_dict())
    stages.block.shift.copy_(values.block.shift)


def assign(stages: Stages, values: Mixed) -> None:
    stages.load_state_dict(copy.deepcopy(values.state_dict()), assign=True)
    stages.block.shift = values.block.shift.clone()


def set_each(stages: Stages, values: Mixed) -> None:
    for name, value in (*values.named_parameters(), *values.named_buffers()):
        path, _, leaf = name.rpartition(".")
        setattr(stages.get_submodule(path) if path else stages, leaf, copy.deepcopy(value))


def set_modules(stages: Stages, values: Mixed) -> None:
    for name, module in values.named_children():
        setattr(stages, name, copy.deepcopy(module))
    stages.scale, stages.offset = copy.deepcopy(values.scale), values.offset.clone()


can_assign = pytest.mark.skipif(not hasattr(torch, "func"), reason="PyTorch 1.12 assigns no state dict")
WAYS = [load, pytest.param(assign, marks=can_assign), set_each, set_modules]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("again", [lambda one: one, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_what_is_set_is_what_the_stages_compute_with(way: Callable[..., None], again: Callable[..., Any]) -> None:
    stages, values = again(cut_everywhere(other(0))), other()
    way(stages, values)
    assert torch.equal(stages(X), values(X))
    stages.double()
    assert torch.equal(stages(X.double()), values.double()(X.double()))


@pytest.mark.skipif(not hasattr(torch, "func"), reason="PyTorch 1.12 has another functional_call")
def test_a_functional_call_takes_the_values_given_and_leaves_the_stages_own() -> None:
    own, values = other(0), other()
    stages = cut_everywhere(copy.deepcopy(own))
    given = {**dict(values.named_parameters()), **dict(values.named_buffers())}
    assert torch.equal(torch.func.functional_call(stages, given, (X,)), values(X))
    assert torch.equal(stages(X), own(X))


def test_what_is_deleted_the_stages_do_not_compute_with() -> None:
    stages = cut_everywhere(other())
    del stages.scale
    with pytest.raises(AttributeError, match="scale"):
        stages(X)


def test_a_module_that_several_stages_call_is_one() -> None:
    model = other()
    stages = cut_everywhere(copy.deepcopy(model))
    calls: list[int] = []
    stages.twice.register_forward_hook(lambda *_: calls.append(1))
    stages.drop.train()
    model.drop.train()
    torch.manual_seed(2)
    found = stages(X)
    torch.manual_seed(2)
    assert torch.equal(found, model(X))
    assert len(calls) == 2


@pytest.mark.parametrize("own", [True, False])
def test_names_are_in_the_model_s_order(own: bool) -> None:
    model = other()
    stages = cut_everywhere(copy.deepcopy(model), own=own)
    assert list(stages.state_dict()) == list(model.state_dict())
    assert list(merge_state_dicts(stages)) == list(names_of(stages)) == list(model.state_dict())
    assert [name for name, _ in stages.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert [name for name, _ in stages.named_buffers()] == [name for name, _ in model.named_buffers()]


def test_an_optimizer_s_state_is_that_of_the_same_parameters() -> None:
    model = other()
    one = torch.optim.Adam(model.parameters())
    stages = cut_everywhere(copy.deepcopy(model))
    model(X).sum().backward()
    one.step()
    two = torch.optim.Adam(stages.parameters())
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    own = dict(stages.named_parameters())
    for name, parameter in model.named_parameters():
        expected, found = one.state[parameter], two.state[own[name]]
        assert expected.keys() == found.keys(), name
        assert not expected or torch.equal(expected["exp_avg"], found["exp_avg"]), name


class Told(nn.Module):
    """Is opened, and has a state beside its tensors."""

    def __init__(self, told: Any) -> None:
        super().__init__()
        self.layer, self.told = nn.Linear(4, 4), told

    def get_extra_state(self) -> Any:
        return self.told

    def set_extra_state(self, state: Any) -> None:
        self.told = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * 2


class Telling(Told):
    def __init__(self, told: Any) -> None:
        super().__init__(told)
        self.inner, self.last = Told({"more": told, "tensor": torch.ones(2)}), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(self.layer(x)))


@pytest.mark.parametrize(
    "told", ["one", np.array([1.0, float("nan")]), [torch.tensor(float("nan")), {"a": np.arange(2)}]]
)
def test_a_state_dict_has_the_extra_state_of_opened_modules(told: Any) -> None:
    model = Telling(told)
    stages = cut_everywhere(copy.deepcopy(model))
    assert list(stages.state_dict()) == list(merge_state_dicts(stages)) == list(model.state_dict())
    model.load_state_dict(stages.state_dict())
    stages.load_state_dict(model.state_dict())
    copy.deepcopy(stages).load_state_dict(copy.deepcopy(model).state_dict())


def test_the_extra_state_of_the_cut_is_no_more_the_modules() -> None:
    model = Telling({"a": 1})
    stages, before = cut_everywhere(model), copy.deepcopy(model.state_dict())
    model.told["a"] = 2
    stages.load_state_dict(before)


def test_another_extra_state_than_that_of_the_cut_is_refused() -> None:
    stages = cut_everywhere(Telling("one"))
    with pytest.raises(RuntimeError, match=r"expected 'inner\._extra_state' as it was when the model was cut"):
        stages.load_state_dict(Telling("two").state_dict())
    state = Telling("one").state_dict()
    del state["_extra_state"]
    with pytest.raises(RuntimeError, match="Missing key"):
        stages.load_state_dict(state)
    stages.load_state_dict(state, strict=False)


def test_hooks_of_state_dicts_that_stages_lack_are_told() -> None:
    model = Telling("one")
    model.inner._register_state_dict_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="found some of inner, which the stages"):
        cut_everywhere(model)


def test_stages_are_all_of_a_model_in_order() -> None:
    stages = list(cut_everywhere(other()))
    for given in ([], stages[1:], stages[:-1], stages[::-1], [stages[0], *stages]):
        for run in (Stages, lambda given: run_stages(given, X)):
            with pytest.raises(PartitionError, match=r"stages of a model in order, found .*; give what split"):
                run(given)
    with pytest.raises(PartitionError, match="expected stages, found Linear"):
        Stages([nn.Linear(2, 2)])  # type: ignore[list-item]


def test_only_stages_are_materialised() -> None:
    with pytest.raises(PartitionError, match="expected a Stage, found Linear"):
        materialize(nn.Linear(2, 2), "cpu")  # type: ignore[arg-type]


class Shadowed(nn.Module):
    def forward(self, torch: Any) -> Any:
        return torch * 2


def test_what_cannot_be_cut_is_told() -> None:
    nothing: Any = None
    with pytest.raises(PartitionError, match="a TracedModel or a GraphModule to cut, found NoneType"):
        split(nothing, {})
    found = trace(Shadowed(), (X,))
    with pytest.raises(PartitionError, match="arguments with other names than 'torch'"):
        split(found, {"mul": 0})
    for stage in ("0", 0.0, None):
        with pytest.raises(PartitionError, match=f"the number of a stage for 'mul', found {stage!r}; count from 0"):
            split(found, {"mul": stage})  # type: ignore[dict-item]


class Around(nn.Module):
    """Stays whole, since it reads a value."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x) * (2 if x.sum() < 1e9 else 1)
        return found


class Twins(nn.Module):
    """Has one layer under three names, two of them inside of others."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Linear(4, 4)
        self.one, self.drop, self.two = Around(self.same), nn.Dropout(0.0), Around(self.same)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.two(self.drop(self.one(x)))
        return found


@pytest.mark.parametrize("own", [False, True])
def test_a_module_with_several_names_is_one_in_all_stages(own: bool) -> None:
    model = Twins()
    stages = cut_everywhere(copy.deepcopy(model), own=own)
    assert list(stages.state_dict()) == list(model.state_dict())
    assert stages.one.layer is stages.two.layer is stages.same
    calls: list[int] = []
    stages.two.layer.register_forward_hook(lambda *_: calls.append(1))
    for one in (stages, model):
        one.same.weight = nn.Parameter(torch.ones(4, 4))
    assert torch.equal(stages(X), model(X))
    assert len(calls) == 2
    for one in (stages, model):
        one(X).sum().backward()
    assert torch.equal(stages.one.layer.weight.grad, model.same.weight.grad)
    assert len(list(stages.parameters())) == 2
    assert torch.equal(copy.deepcopy(stages).double()(X.double()), model.double()(X.double()))
    stages.load_state_dict(model.state_dict())
