"""What dropout makes is made again from the mask that it drew, bit for bit, and draws nothing anew."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import torch_lms
from tests.same_tensors import same_tensors
from tests.unit.fresh_process import in_fresh_process
from tests.unit.markers import counts_exactly
from tests.unit.planned_programs import Step, gradients_of, limit_for, on, wait_for_planner
from tests.unit.trainings import one_thread
from torch_lms._core import core
from torch_lms.plan.decision import RECOMPUTE

ROWS, WIDTH, LAYERS = 256, 64, 6
PLANNED_WITHIN_S = 150


class Dropped(nn.Module):
    """With the op that dropout is on a GPU; on a CPU, `nn.Dropout` is several others."""

    def __init__(self, p: float, *, train: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.p, self.draws = p, train

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept, mask = torch.native_dropout(torch.relu(self.up(x)), self.p, self.draws)
        assert not mask.requires_grad
        return x + self.down(kept)


def training(p: float, train: bool = True) -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(*(Dropped(p, train=train) for _ in range(LAYERS)))

    def step(number: int) -> list[torch.Tensor]:
        torch.manual_seed(number)
        model.zero_grad()
        loss = model(torch.randn(ROWS, WIDTH)).square().mean()
        loss.backward()
        return [loss.detach().clone(), *gradients_of(model), torch.rand(4)]

    return step


@one_thread()
def made_again(begin: Callable[[], Step], swap: bool, share: float = 0.6) -> tuple[list[str], bool]:
    """The ops whose results a plan makes again within a share of the peak, and whether a run was as without a limit."""
    expected = [begin()(number) for number in (5, 6)]
    on(limit_for(begin, share), swap=swap)
    step = begin()
    while not core.follows_timed_plan():
        step(0)
        wait_for_planner()
    found = [step(number) for number in (5, 6)]
    plan = torch_lms.current_plan()
    assert plan is not None
    equal = all(same_tensors(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    return [one.op for one in plan.decisions if one.decision == RECOMPUTE], equal


@counts_exactly
@pytest.mark.parametrize("p", [0.1, 0.5, 0.93])
def test_what_dropout_made_is_made_again(p: float) -> None:
    ops, equal = in_fresh_process(made_again, partial(training, p), False, within_s=PLANNED_WITHIN_S)
    assert ops.count("aten::native_dropout") > 1
    assert equal


@counts_exactly
@pytest.mark.parametrize(("p", "train"), [(0.0, True), (0.5, False)])
def test_dropout_that_draws_nothing_is_left_alone(p: float, train: bool) -> None:
    ops, equal = in_fresh_process(made_again, partial(training, p, train), True, within_s=PLANNED_WITHIN_S)
    assert "aten::native_dropout" not in ops
    assert equal
