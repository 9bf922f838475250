"""Stages do what a `train` of the model's own does, or refuse the other mode."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.stages.test_modes import SOURCES_OF_GRAPHS, Block, Body, Model, X, assert_same, cut, modules, norm
from torch_lms.errors import PartitionError
from torch_lms.stages.own_modes import find_own_modes


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
