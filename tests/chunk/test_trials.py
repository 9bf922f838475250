"""Optimizers are tried before anything changes: what couples tensors is found, and nothing is left of the trials."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch

from tests.chunk.small_model import chunked, make, step
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
