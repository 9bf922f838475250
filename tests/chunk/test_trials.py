"""Optimizers are tried before anything changes: what couples tensors is found, and nothing is left of the trials."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD

import torch_lms
from tests.chunk.small_model import chunked, make, step
from tests.unit.trainings import same_bits
from torch_lms.chunk import ShardedState
from torch_lms.chunk.placement import UpdateRates, chosen_update
from torch_lms.chunk.trials import treats_each_element_alone, treats_each_tensor_alone, update_seconds
from torch_lms.errors import ChunkError

CPU = torch.device("cpu")


class ByDistance(torch.optim.Optimizer):
    """Its steps grow with how far all parameters have gone together: nothing in the first step."""

    def __init__(self, parameters: Any, lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                self.state[one].setdefault("start", one.clone())
            gone = torch.stack([(one - self.state[one]["start"]).norm() for one in group["params"]]).norm()
            for one in group["params"]:
                one.sub_(one.grad, alpha=group["lr"] * (1 + 100 * float(gone)))


class FindsItsRate(torch.optim.Optimizer):
    """As Prodigy: a rate for all is found out by how far signs of gradients lead, from next to nothing."""

    def __init__(self, parameters: Any, lr: float = 1.0) -> None:
        super().__init__(parameters, {"lr": lr, "d": 1e-6, "way": 0.0, "total": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        rate = group["d"] * group["lr"]
        for one in group["params"]:
            start = self.state[one].setdefault("start", one.clone())
            group["way"] += rate * float((one.grad * (start - one)).sum())
            kept = self.state[one].setdefault("sum", torch.zeros_like(one)).add_(one.grad, alpha=rate)
            group["total"] += float(kept.abs().sum())
            one.sub_(one.grad.sign(), alpha=rate)
        if group["lr"] == 1.0:
            group["d"] = max(group["d"], 10 * group["way"] / group["total"])


@pytest.mark.parametrize("optimize", [ByDistance, FindsItsRate])
def test_optimizers_that_couple_tensors_from_their_second_step_on_are_refused(optimize: Any) -> None:
    with pytest.raises(ChunkError, match=f"treats each parameter alone, found {optimize.__name__}, whose update"):
        chunked(make(), optimize)


class ByPlace(torch.optim.SGD):
    """Rates fall from one parameter to the next, in each step or by what the list of their momenta says."""

    def __init__(self, parameters: Any, *, in_list: bool) -> None:
        super().__init__(parameters, lr=0.1)
        self.momenta: list[torch.Tensor] | None = [] if in_list else None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for place, one in enumerate(self.param_groups[0]["params"]):
            if self.momenta is None:
                one.sub_(one.grad, alpha=0.1 * 0.9**place)
                continue
            if place == len(self.momenta):
                self.momenta.append(torch.zeros_like(one))
            one.sub_(self.momenta[place].mul_(0.9).add_(one.grad), alpha=0.1)


@pytest.mark.parametrize("in_list", [True, False])
def test_optimizers_that_go_by_a_tensors_place_are_refused(in_list: bool) -> None:
    alike = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    with pytest.raises(ChunkError, match=r"found ByPlace, whose update of one depends on others.*by its place"):
        chunked(alike, partial(ByPlace, in_list=in_list))


class Wrapping(torch.optim.Optimizer):
    """Its step is another one's."""

    def __init__(self, parameters: Any) -> None:
        self.inside = torch.optim.SGD(list(parameters), lr=0.1)
        super().__init__(self.inside.param_groups, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inside.step()


def test_an_optimizer_that_moves_nothing_is_refused() -> None:
    with pytest.raises(ChunkError, match=r"found Wrapping, which has changed nothing .* another optimizer"):
        chunked(make(), Wrapping)


class Remembers(torch.optim.SGD):
    """Keeps its momentum in a dict of its own."""

    def __init__(self, parameters: Any, key: Any = lambda one: one) -> None:
        super().__init__(parameters, lr=0.1)
        self.key, self.momenta = key, dict[Any, torch.Tensor]()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.param_groups[0]["params"]:
            momentum = self.momenta.setdefault(self.key(one), torch.zeros_like(one))
            one.sub_(momentum.mul_(0.9).add_(one.grad), alpha=0.1)


def test_an_optimizer_that_knows_tensors_as_objects_is_not_streamed() -> None:
    for optimize in (Remembers, partial(Remembers, key=id)):
        with pytest.raises(ChunkError, match="found Remembers, which knows them as objects; pass update_on='device'"):
            chunked(make(), optimize, update_on="stream")
    choice = chosen_update({"masters": 1, "optimizer state": 2}, torch.device("cuda"), 1, rates, lambda: False)
    assert choice.update_on == "device"
    made = [
        chunked(make(), optimize, update_on="device") for optimize in (Remembers, partial(SGD, lr=0.1, momentum=0.9))
    ]
    for _ in range(3):
        for model, optimizer in made:
            step(model, optimizer)
    assert same_bits(*(list(model.state_dict().values()) for model, _ in made))


def rates() -> UpdateRates:
    return UpdateRates(out_bytes_per_us=5e4, in_bytes_per_us=5e4, device_ns=0.01, host_ns=9.0)


class ByName(torch.optim.SGD):
    """The last layer stays as it is."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for name, one in zip(self.param_groups[0]["param_names"], self.param_groups[0]["params"], strict=True):
            if not name.startswith("4."):
                one.sub_(one.grad, alpha=0.1)


@pytest.mark.parametrize("update_on", ["device", "stream", "host"])
def test_an_optimizer_that_goes_by_names_has_those_of_its_tensors(update_on: str) -> None:
    model, before = make(), make().state_dict()
    trained = torch_lms.chunked(model, ByName(model.named_parameters()), chunk_numel=4608, update_on=update_on)
    for _ in range(2):
        step(*trained)
    moved = {name for name, one in model.state_dict().items() if not torch.equal(one, before[name])}
    assert moved == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_a_checkpoint_draws_no_random_numbers() -> None:
    model, optimizer = chunked(make(), Noisy)
    torch.manual_seed(7)
    inner = optimizer._inner
    program, own = torch.get_rng_state(), [inner.generators[0].get_state(), inner.generators[1].getstate()]
    ShardedState(model, optimizer).state_dict()
    assert torch.equal(torch.get_rng_state(), program)
    assert torch.equal(inner.generators[0].get_state(), own[0])
    assert inner.generators[1].getstate() == own[1]
    assert inner.counts == {"steps": 0, "in": {"a list": [0, torch.zeros(())]}}


def test_rates_are_those_of_the_program_also_if_a_schedule_begins_with_none() -> None:
    model = make()
    optimizer = FindsItsRate(model.parameters())
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0
    assert not treats_each_tensor_alone(optimizer, optimizer.param_groups[0], CPU)


@pytest.mark.parametrize(
    "optimize",
    [
        *(partial(torch.optim.SGD, lr=lr, momentum=0.9) for lr in (0.0, 1e-5, 1.0, torch.tensor(0.1))),
        *(torch.optim.AdamW, torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax),
        *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.ASGD, torch.optim.Rprop, torch.optim.RMSprop),
        partial(torch.optim.Adam, amsgrad=True, foreach=True),
        partial(torch.optim.AdamW, fused=True),
        torch.optim.Adafactor,
        torch.optim.Muon,
    ],
)
def test_optimizers_that_couple_none_are_not(optimize: Any) -> None:
    optimizer = optimize([torch.ones(8, 8, requires_grad=True)])
    assert treats_each_tensor_alone(optimizer, optimizer.param_groups[0], CPU)


class Noisy(torch.optim.SGD):
    """Draws random numbers, of the program's and of its own, and counts in all that can hold a count."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, lr=lr)
        self.generators = [torch.Generator().manual_seed(1), random.Random(1)]
        self.counts: dict[str, Any] = {"steps": 0, "in": {"a list": [0, torch.zeros(())]}}
        self.param_groups[0]["counts"] = [0]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.counts["steps"] += 1
        self.counts["in"]["a list"][1] += 1
        self.param_groups[0]["counts"].append(self.generators[1].random())
        for one in self.param_groups[0]["params"]:
            one.sub_(one.grad + torch.randn_like(one) + torch.rand((), generator=self.generators[0]), alpha=0.01)


def test_trials_leave_nothing_behind() -> None:
    torch.manual_seed(5)
    model = make()
    optimizer = Noisy(model.parameters())
    program, own = torch.get_rng_state(), [optimizer.generators[0].get_state(), optimizer.generators[1].getstate()]
    update_seconds(optimizer, 100, CPU, torch.bfloat16)
    treats_each_element_alone(optimizer, CPU)
    chunked(model, lambda _: optimizer)
    assert torch.equal(torch.get_rng_state(), program)
    assert torch.equal(optimizer.generators[0].get_state(), own[0])
    assert optimizer.generators[1].getstate() == own[1]
    assert optimizer.counts == {"steps": 0, "in": {"a list": [0, torch.zeros(())]}}
    assert optimizer.param_groups[0]["counts"] == [0]


def test_an_optimizer_that_draws_random_numbers_is_not_taken_for_one_that_couples_tensors(
    recwarn: pytest.WarningsRecorder,
) -> None:
    step(*chunked(make(), Noisy))
    assert not recwarn.list
