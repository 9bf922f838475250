"""What a plan says is to be made again is dropped, each time: nothing else may have to make room for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import torch_lms
from benchmarks.peers import checkpoint_blocks
from benchmarks.workloads import make_program
from tests.unit.fresh_process import in_fresh_process
from tests.unit.markers import counts_exactly
from tests.unit.planned_programs import Step, gradients_of, limit_for, on, wait_for_planner
from tests.unit.trainings import one_thread
from torch_lms._core import core
from torch_lms.plan.decision import RECOMPUTE
from torch_lms.swap.planning import last_trace

ROWS, TOKENS, WIDTH = 4, 64, 64
PLANNED_WITHIN_S = 150


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


def checkpointed() -> Step:
    """Under autocast: what a norm gives besides its result dies at once, and casts make storages then."""
    program = make_program("gpt_autocast", "cpu", tiny=True)
    checkpoint_blocks(program)
    optimizer = torch.optim.AdamW(program.model.parameters())

    def step(number: int) -> list[torch.Tensor]:
        torch.manual_seed(number)
        optimizer.zero_grad()
        with program.scope():
            loss = program.loss()
        loss.backward()
        optimizer.step()
        return [loss.detach()]

    return step


@one_thread()
def planned_and_dropped(begin: Callable[[], Step], swap: bool) -> tuple[list[int], int, int]:
    """Bytes that a plan says are made again, in a step those that were dropped, and those that were copied out."""
    on(limit_for(begin, 0.6), swap=swap)
    step = begin()
    while not core.follows_timed_plan():
        step(0)
        wait_for_planner()
    torch_lms.stats(reset=True)
    step(0)
    found, plan, trace = torch_lms.stats(), torch_lms.current_plan(), last_trace()
    assert plan is not None
    assert trace is not None
    planned = [trace.storages[one.storage].bytes for one in plan.decisions if one.decision == RECOMPUTE]
    return planned, found.recomputable_bytes, found.pageout_bytes


@counts_exactly
@pytest.mark.parametrize("bias", [False, True], ids=["without biases", "with biases"])
def test_all_that_is_to_be_made_again_is_dropped(bias: bool) -> None:
    """In a process of its own: what has been found out about a kind of op stays as long as the process does."""
    planned, dropped_bytes, copied_bytes = in_fresh_process(
        planned_and_dropped, partial(training, bias), False, within_s=PLANNED_WITHIN_S
    )
    assert len(planned) > 5
    assert dropped_bytes >= sum(planned)
    assert copied_bytes == 0


@counts_exactly
@pytest.mark.slow
def test_a_storage_in_the_place_of_one_that_has_died_keeps_nothing_from_being_dropped() -> None:
    planned, dropped_bytes, _ = in_fresh_process(planned_and_dropped, checkpointed, True, within_s=PLANNED_WITHIN_S)
    assert len(planned) > 5
    assert dropped_bytes >= sum(planned)
