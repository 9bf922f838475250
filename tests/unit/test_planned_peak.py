"""A step that follows a plan needs as much memory as it says: what goes, or comes, does so when the plan says."""

from __future__ import annotations

from statistics import median

import pytest
import torch

import torch_lms
from tests.unit.fresh_process import in_fresh_process
from tests.unit.markers import counts_exactly
from tests.unit.planned_programs import PROGRAMS, STEPS, Step, batch, limit_for, model_of, on, wait_for_planner
from tests.unit.trainings import one_thread
from torch_lms._core import core
from torch_lms.swap.planning import last_trace

PLANNED_WITHIN_S = 150
ODD_ROWS = 71


@one_thread()
def measured_and_predicted(program: str, share: float) -> tuple[float, int]:
    """The peak of most steps: on a busy machine a copy out is late now and then."""
    begin = PROGRAMS[program]
    on(limit_for(begin, share))
    step, number = begin(), 0
    peaks_bytes: list[int] = []
    while len(peaks_bytes) < STEPS:
        follows = core.follows_timed_plan()
        torch_lms.stats(reset=True)
        step(number)
        wait_for_planner()
        peaks_bytes += [torch_lms.stats().peak_allocated_bytes] if follows else []
        number += 1
    plan = torch_lms.current_plan()
    assert plan is not None
    assert plan.predicted.peak_bytes < plan.predicted.plain_peak_bytes
    return median(peaks_bytes), plan.predicted.peak_bytes


@counts_exactly
@pytest.mark.parametrize(("program", "share"), [("custom function", 0.7), ("saved tensor hooks", 0.8)])
def test_the_peak_is_the_predicted_one(program: str, share: float) -> None:
    measured, predicted = in_fresh_process(measured_and_predicted, program, share, within_s=PLANNED_WITHIN_S)
    assert measured == pytest.approx(predicted, rel=0.01)


def letting_go() -> Step:
    """Lets go of what was made before each cosine."""
    model = model_of()

    def step(number: int) -> list[torch.Tensor]:
        model.zero_grad()
        model(batch(number)).square().mean().backward()
        x = batch(number, ODD_ROWS)
        for ops in range(5):
            made = x.sin()
            for _ in range(ops):
                x = x + 1
            del made
            x = x.cos()
        return [x]

    return step


@counts_exactly
@one_thread()
def test_a_recording_knows_when_a_storage_has_gone() -> None:
    on(limit_for(letting_go))
    step = letting_go()
    while (trace := last_trace()) is None:
        step(0)
        wait_for_planner()
    names = [op.name for op in trace.ops]
    made = [one for one in trace.storages if one.producer is not None and names[one.producer] == "aten::sin"]
    assert len(made) == 5
    assert [names[one.released + 1] for one in made if one.released is not None] == ["aten::cos"] * 5
