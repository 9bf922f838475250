"""What a plan says is to be made again is dropped, each time: nothing else may have to make room for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import torch_lms
from tests.unit.markers import counts_exactly
from tests.unit.test_plans import Step, gradients_of, limit_for, on, wait_for_planner
from tests.unit.trainings import one_thread
from torch_lms._core import core
from torch_lms.plan.decision import RECOMPUTE
from torch_lms.swap.planning import last_trace

ROWS, TOKENS, WIDTH = 4, 64, 64


class Gated(nn.Module):
    """As in Llama: without biases, so that a matrix product's result goes on through a view that is an op."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 4 * WIDTH, bias=bias) for _ in range(2))
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.gate(x)) * self.up(x))


def training(bias: bool) -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(*(Gated(bias) for _ in range(5)))

    def step(number: int) -> list[torch.Tensor]:
        model.zero_grad()
        x = torch.randn(ROWS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(number))
        loss = model(x).square().mean()
        loss.backward()
        return [loss.detach().clone(), *gradients_of(model)]

    return step


@counts_exactly
@one_thread()
@pytest.mark.parametrize("bias", [False, True], ids=["without biases", "with biases"])
def test_all_that_is_to_be_made_again_is_dropped(bias: bool) -> None:
    begin: Callable[[], Step] = partial(training, bias)
    on(limit_for(begin, 0.55), swap=False)
    step, began_s = begin(), time.monotonic()
    while not core.follows_timed_plan():
        assert time.monotonic() - began_s < 150
        step(0)
        wait_for_planner()
    torch_lms.stats(reset=True)
    step(0)
    found, plan, trace = torch_lms.stats(), torch_lms.current_plan(), last_trace()
    assert plan is not None
    assert trace is not None
    planned = [trace.storages[one.storage].bytes for one in plan.decisions if one.decision == RECOMPUTE]
    assert len(planned) > 5
    assert found.recomputable_bytes >= sum(planned)
    assert found.pageout_bytes == 0
