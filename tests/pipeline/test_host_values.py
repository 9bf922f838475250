"""Numbers and states of random generators, which cross borders from program to program."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import fx, nn

from torch_lms.pipeline.borders import has_numbers
from torch_lms.pipeline.boundary import Boundary, Microbatch
from torch_lms.pipeline.host_values import HostValues
from torch_lms.stages import split

CPU = torch.device("cpu")
NUMBERS = [7, -1, 2**40, True, 0.5, -0.0, math.inf, math.nan]


class Kept:
    """Messages of one process; each is heard once."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def tell(self, key: str, value: Any) -> None:
        assert key not in self.kept
        self.kept[key] = value

    def hear(self, key: str, _teller: int) -> Any:
        return self.kept.pop(key)


class Scaled(nn.Module):
    """Scales by a number, and draws random numbers, on both sides of a border."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, by: Any) -> torch.Tensor:
        y = self.first(x) * by[0]
        loss: torch.Tensor = (self.last(y) * by[0]).sum()
        return loss


def boundaries(messages: Kept, carries_random: bool) -> list[Boundary]:
    model = Scaled()
    traced = fx.symbolic_trace(model)
    names = [node.name for node in traced.graph.nodes if node.op.startswith("call_")]
    # The number is taken out before the border and used behind it.
    for node in [node for node in traced.graph.nodes if node.name == "getitem_1"]:
        node.replace_all_uses_with(next(one for one in traced.graph.nodes if one.name == "getitem"))
        traced.graph.erase_node(node)
    names.remove("getitem_1")
    stage_of = {name: int(place >= names.index("last")) for place, name in enumerate(names)}
    values: Any = messages
    host_values = HostValues(values, 1)
    host_values.start("run")
    return [
        Boundary(stage, CPU, None, 1, host_values=host_values, carries_random=carries_random)
        for stage in split(traced, stage_of, model=model)
    ]


def batch(number: Any, place: int, seed: int | None = None) -> Microbatch:
    return Microbatch({"x": torch.ones(64), "by": [number]}, None, seed, place)


def prepared(messages: Kept, first: Microbatch, carries_random: bool = False) -> list[Boundary]:
    made = boundaries(messages, carries_random)
    carriers = made[0].prepare(None, [], first.before_all())
    made[1].prepare(made[0].crossing.outgoing, carriers, first.before_all())
    assert not messages.kept
    return made


@pytest.mark.parametrize("number", NUMBERS)
def test_each_microbatch_has_its_own_number_behind_the_border(number: Any) -> None:
    messages = Kept()
    numbers = [number, *(type(number)(other) for other in (1, 0))]
    microbatches = [batch(one, place) for place, one in enumerate(numbers)]
    first, last = prepared(messages, microbatches[0])
    assert has_numbers(first.crossing.outgoing)
    assert all(meta.dtype == torch.float32 for meta in first.metas(first.crossing.outgoing))
    model = Scaled()
    for boundary in (first, last):
        boundary.load(microbatches)
    crossed = []
    for _ in numbers:  # all forwards of the first stage before any of the second
        torch.manual_seed(1)
        crossed.append([carrier.detach().requires_grad_() for carrier in first()])
    for one, carriers in zip(numbers, crossed, strict=True):
        torch.manual_seed(2)
        found = last(*carriers)
        torch.manual_seed(1)
        y = model.first(torch.ones(64)) * one
        torch.manual_seed(2)
        torch.testing.assert_close(found, (model.last(y) * one).sum(), rtol=0, atol=0, equal_nan=True)
    assert not messages.kept


def test_random_numbers_go_on_behind_the_border_as_on_one_device() -> None:
    messages = Kept()
    microbatches = [batch(2, place, seed=10 + place) for place in range(2)]
    first, last = prepared(messages, microbatches[0], carries_random=True)
    for boundary in (first, last):
        boundary.load(microbatches)
    before = torch.get_rng_state()
    crossed = [[carrier.detach().requires_grad_() for carrier in first()] for _ in microbatches]
    found = [last(*carriers) for carriers in crossed]
    assert torch.equal(torch.get_rng_state(), before)
    for one, microbatch in zip(found, microbatches, strict=True):
        assert microbatch.seed is not None
        torch.manual_seed(microbatch.seed)
        assert torch.equal(one, Scaled()(torch.ones(64), [2]))
    assert not messages.kept


def test_what_is_on_the_device_alone_is_not_told() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    traced = fx.symbolic_trace(model)
    stages = split(traced, {"_0": 0, "_1": 1}, model=model)
    boundary = Boundary(stages[0], CPU, None, 1, host_values=Any, carries_random=False)  # type: ignore[arg-type]
    microbatch = Microbatch({"input": torch.ones(2, 4)})
    assert len(boundary.prepare(None, [], microbatch)) == 1
