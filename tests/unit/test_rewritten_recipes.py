"""What an op made and others wrote to in place is made again by all of them, bit for bit; batch norm counts once."""

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
from tests.unit.planned_programs import Step, gradients_of, limit_and_results, limit_for, on, run, wait_for_planner
from tests.unit.trainings import MIN_BYTES, one_thread
from torch_lms._core import core
from torch_lms.plan.decision import RECOMPUTE
from torch_lms.plan.recording import trace_of
from torch_lms.plan.trace import Link, Recipe
from torch_lms.swap.planning import last_trace

WIDTH, SIDE, ROWS, BLOCKS = 8, 16, 8, 5
PLANNED_WITHIN_S = 200


class Block(nn.Module):
    """As in torchvision's ResNet, with a branch that is written in place, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.last_norm = nn.BatchNorm2d(WIDTH), nn.BatchNorm2d(WIDTH, momentum=None)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.norm(self.first(x)))
        out = self.last_norm(self.second(out))
        out += x
        return self.relu(out)


def training(*, train: bool = True) -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, WIDTH, 3, padding=1), *(Block() for _ in range(BLOCKS)))
    model.train(train)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(number: int) -> list[torch.Tensor]:
        optimizer.zero_grad()
        x = torch.randn(ROWS, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(number))
        loss = model(x).square().mean()
        loss.backward()
        found = [loss.detach().clone(), *gradients_of(model), *(buffer.clone() for buffer in model.buffers())]
        optimizer.step()
        return found

    return step


@one_thread()
def made_again(begin: Callable[[], Step]) -> tuple[list[tuple[str, list[str]]], int, int, bool]:
    """The ops whose results a plan makes again, with those that wrote to these; the bytes of them, those that were

    dropped in a step, and whether each step was as without a limit.
    """
    limit_bytes = limit_for(begin, 0.6)
    plain = begin()
    on(limit_bytes, swap=False)
    step, equal = begin(), True
    while not core.follows_timed_plan():
        equal = equal and same_tensors(step(0), plain(0))
        wait_for_planner()
    torch_lms.stats(reset=True)
    equal = equal and same_tensors(step(1), plain(1))
    dropped_bytes = torch_lms.stats().recomputable_bytes
    plan, trace = torch_lms.current_plan(), last_trace()
    assert plan is not None
    assert trace is not None
    found = []
    for one in plan.decisions:
        recipe = trace.storages[one.storage].recompute
        if one.decision == RECOMPUTE and recipe is not None:
            found.append((one.op, [trace.ops[place].name for place in recipe.rewrites]))
    planned_bytes = sum(one.bytes for one in plan.decisions if one.decision == RECOMPUTE)
    return found, planned_bytes, dropped_bytes, equal


@counts_exactly
@pytest.mark.parametrize("train", [True, False], ids=["training", "with fixed statistics"])
def test_what_is_normalized_and_written_in_place_is_made_again(train: bool) -> None:
    found, planned_bytes, dropped_bytes, equal = in_fresh_process(
        made_again, partial(training, train=train), within_s=PLANNED_WITHIN_S
    )
    assert equal
    assert found.count(("aten::native_batch_norm", ["aten::relu_"])) > 1
    assert found.count(("aten::native_batch_norm", ["aten::add_", "aten::relu_"])) > 1
    assert dropped_bytes >= planned_bytes > 0


@one_thread()
def test_training_under_a_limit_is_bit_equal() -> None:
    limit_bytes, expected = limit_and_results(training, 0.6)
    torch_lms.enable({"cpu": limit_bytes}, min_bytes=MIN_BYTES)
    assert list(run(training)) == expected


def op_that(writes: bool, inputs: list[int], outputs: list[int]) -> dict[str, object]:
    return {
        "name": "op", "key": len(inputs), "backward": False, "duration_us": 1.0, "allocated_bytes": 0,
        "paged_out_bytes": 0, "peak_bytes": 0, "inputs": inputs, "written": [writes] + [False] * (len(inputs) - 1),
        "outputs": outputs,
    }  # fmt: skip


def recorded(number: int, **facts: object) -> dict[str, object]:
    return {
        "bytes": 8, "recurring": number == 0, "producer": number - 1, "released": -1, "movable": True,
        "raw_access": False, "ingredients": [], "rewrites": [], "outside_bytes": 0, "why_not_recompute": "",
        "module": "", "line": "", **facts,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("rewrites", "why_not"),
    [([1, 2], ""), ([1], "cannot be run again"), ([2], "cannot be run again"), ([], "cannot be run again")],
)
def test_a_recipe_runs_all_writes_or_there_is_none(rewrites: list[int], why_not: str) -> None:
    ops = [op_that(False, [0], [1]), op_that(True, [1], [1]), op_that(True, [1, 0], [1]), op_that(False, [1], [])]
    storages = [recorded(0, why_not_recompute="no op made it"), recorded(1, ingredients=[0, 0], rewrites=rewrites)]
    recording = {"device": "cpu", "ops": ops, "storages": storages}
    trace = trace_of(recording, limit_bytes=1, link=Link(out_bytes_per_us=1.0, in_bytes_per_us=1.0))
    made = trace.storages[1]
    assert made.writes == (1, 2)
    assert why_not in made.why_not_recompute
    assert made.recompute == (None if why_not else Recipe(duration_us=3.0, inputs=(0,), rewrites=(1, 2)))


@pytest.mark.parametrize("held_bytes", [0, 50])
def test_a_recipe_has_the_working_space_by_which_an_op_exceeds_those_around_it(held_bytes: int) -> None:
    """Besides what is held before that op, and released after it."""
    live_bytes = 16
    other_bytes = [held_bytes + 5, held_bytes + 5, held_bytes + 105, 5, 5]
    ops = [op_that(False, [0], [1]), op_that(False, [0], []), op_that(True, [1], [1]), *[op_that(False, [1], [])] * 2]
    ops = [op | {"peak_bytes": live_bytes + other} for op, other in zip(ops, other_bytes, strict=True)]
    storages = [recorded(0, why_not_recompute="no op made it"), recorded(1, ingredients=[0], rewrites=[2])]
    recording = {"device": "cpu", "ops": ops, "storages": storages}
    trace = trace_of(recording, limit_bytes=1, link=Link(out_bytes_per_us=1.0, in_bytes_per_us=1.0))
    assert [op.other_bytes for op in trace.ops] == other_bytes
    made = trace.storages[1].recompute
    assert made is not None
    assert made.working_bytes == 100
