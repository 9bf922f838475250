"""Parameters of one element: what an optimizer counts for them has their shape, and is none of their numbers."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.chunk.plain import Chunked, Plain, same, train
from tests.chunk.test_budget import CPU
from tests.chunk.test_chunk_ranks import expect_success
from tests.chunk.test_chunked import OPTIMIZERS
from tests.unit.trainings import one_thread, vector_batch
from torch_lms.chunk import ShardedState
from torch_lms.chunk.budget import needed_bytes
from torch_lms.chunk.ranks import ALONE

STEPS = 3


class Counting(torch.optim.SGD):
    """Counts in a tensor of one element, beside the momentum."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    count = self.state[one].setdefault("count", torch.zeros(1))
                    count += 1
                    one.grad.mul_(1 / float(count))
        super().step(closure)


class Untriable(Counting):
    """Fails on the small matrices that optimizers are tried on."""

    def step(self, closure: Any = None) -> None:
        if any(one.shape == (4, 6) for group in self.param_groups for one in group["params"]):
            raise RuntimeError("on purpose")
        super().step(closure)


OPTIMIZERS = {
    **OPTIMIZERS,
    "counting": partial(Counting, lr=1e-2, momentum=0.9),
    "untriable": partial(Untriable, lr=1e-2, momentum=0.9),
}
pytestmark = pytest.mark.filterwarnings("ignore:expected an optimizer that can be tried")


class Residual(nn.Module):
    """As ReZero's, with a temperature like CLIP's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(512, 64)
        self.outer = nn.Linear(64, 512)
        self.alpha = nn.Parameter(torch.tensor(0.5))
        self.beta = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.beta * x + self.alpha * self.outer(self.inner(x).tanh())
        return found


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Residual(), Residual(), Residual())


def trained(which: type[Plain] | type[Chunked], optimizer: str, **options: Any) -> Any:
    made = which(make(), OPTIMIZERS[optimizer], **options)
    for _ in train(made, vector_batch, STEPS):
        pass
    return made


def expect_same_state(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert list(one["state"]) == list(other["state"])
    for number, values in other["state"].items():
        assert list(one["state"][number]) == list(values)
        for key, value in values.items():
            found = one["state"][number][key]
            assert isinstance(found, torch.Tensor) == isinstance(value, torch.Tensor)
            assert torch.equal(torch.as_tensor(found), torch.as_tensor(value)), (number, key)
            assert torch.as_tensor(found).dtype == torch.as_tensor(value).dtype


@one_thread()
@pytest.mark.parametrize("optimizer", ["AdamW", "fused AdamW", "foreach Adam", "NAdam", "Adagrad", "counting"])
def test_only_what_every_tensor_has_in_its_shape_takes_chunks(optimizer: str) -> None:
    chunked = trained(Chunked, optimizer)
    data = chunked.optimizer.data
    expected = needed_bytes(data.tensors, data.layout, ALONE, chunked.optimizer._inner, CPU)
    found = data.allocated_bytes()
    assert not {"step", "count", "mu_product"} & found.keys()
    assert sum(found.values()) == sum(expected.values())


@one_thread()
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("update_on", ["device", "host", "stream"])
def test_every_optimizer_is_bit_equal_and_has_its_own_state(optimizer: str, update_on: str) -> None:
    plain, chunked = (
        Plain(make(), OPTIMIZERS[optimizer]),
        Chunked(make(), OPTIMIZERS[optimizer], update_on=update_on, chunk_numel=1 << 16),
    )
    steps = (train(one, vector_batch, STEPS) for one in (plain, chunked))
    assert all(same(*both) for both in zip(*steps, strict=True))
    expect_same_state(chunked.optimizer.state_dict(), plain.optimizer.state_dict())


@one_thread()
@pytest.mark.parametrize("optimizer", ["AdamW", "Adafactor", "counting", "untriable"])
@pytest.mark.parametrize("update_on", ["device", "stream"])
def test_a_training_goes_on_from_its_state_dicts(optimizer: str, update_on: str) -> None:
    through = trained(Chunked, optimizer, update_on=update_on)
    saved = copy.deepcopy(through.model.state_dict()), copy.deepcopy(through.optimizer.state_dict())
    again = Chunked(make(), OPTIMIZERS[optimizer], update_on=update_on, chunk_numel=1 << 16)
    again.model.load_state_dict(saved[0])
    again.optimizer.load_state_dict(saved[1])
    expect_same_state(again.optimizer.state_dict(), saved[1])
    steps = (train(one, vector_batch, STEPS) for one in (through, again))
    assert all(same(*both) for both in zip(*steps, strict=True))
    assert again.optimizer.data.allocated_bytes().keys() == through.optimizer.data.allocated_bytes().keys()


@one_thread()
def test_an_optimizer_that_has_stepped_goes_on_in_chunks() -> None:
    model = make()
    given = OPTIMIZERS["AdamW"](model.parameters())
    model(vector_batch(0)[0]).square().mean().backward()
    given.step()
    given.zero_grad()
    plain = Plain(copy.deepcopy(model), OPTIMIZERS["AdamW"])
    plain.optimizer.load_state_dict(copy.deepcopy(given.state_dict()))
    chunked = Chunked(model, lambda _: given)
    assert chunked.optimizer.data.allocated_bytes().keys() == {"parameters", "masters", "exp_avg", "exp_avg_sq"}
    steps = (train(one, vector_batch, STEPS) for one in (plain, chunked))
    assert all(same(*both) for both in zip(*steps, strict=True))


@one_thread()
def test_a_sharded_state_is_loaded(tmp_path: Path) -> None:
    through = trained(Chunked, "AdamW")
    dcp.save({"training": ShardedState(through.model, through.optimizer)}, checkpoint_id=tmp_path)
    again = Chunked(make(), OPTIMIZERS["AdamW"], chunk_numel=1 << 16)
    dcp.load({"training": ShardedState(again.model, again.optimizer)}, checkpoint_id=tmp_path)
    expect_same_state(again.optimizer.state_dict(), through.optimizer.state_dict())
    steps = (train(one, vector_batch, STEPS) for one in (through, again))
    assert all(same(*both) for both in zip(*steps, strict=True))


@pytest.mark.slow
def test_ranks(tmp_path: Path) -> None:
    expect_success("spread_kept:one_element+one_element_saved", 2, tmp_path)
