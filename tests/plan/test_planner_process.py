"""The planner as a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.plan.traces import gpt_trace
from torch_lms.errors import PlanError
from torch_lms.plan import Trace
from torch_lms.plan.pieces import Request, plan_in_pieces
from torch_lms.plan.simulator import simulate
from torch_lms.swap.planner_process import PlannerProcess

TRACE = gpt_trace(layers=4)
PEAK_BYTES = simulate(TRACE, []).peak_bytes


def request(limit_bytes: int, *, trace: Trace = TRACE, margin_bytes: int = 0) -> dict[str, object]:
    return {"trace": json.loads(trace.to_json()), "limit_bytes": limit_bytes, "margin_bytes": margin_bytes}


def test_a_plan_comes_soon_and_only_a_better_one_after_it() -> None:
    limit_bytes = PEAK_BYTES // 2
    soon, *more = PlannerProcess().plans(request(limit_bytes))
    asked = Request(trace=TRACE, limit_bytes=limit_bytes)
    assert soon == plan_in_pieces(asked, simply=True)
    assert [one.name for one in soon.methods if "left out" in one.note] == ["linear"]
    assert all(plan.predicted.step_us < soon.predicted.step_us for plan in more)
    best = plan_in_pieces(asked, simply=False)
    assert [soon, *more][-1].predicted.step_us <= best.predicted.step_us * 1.01


def test_where_the_margin_leaves_no_plan_it_is_given_up() -> None:
    limit_bytes = PEAK_BYTES // 2
    *_, last = PlannerProcess().plans(request(limit_bytes, margin_bytes=limit_bytes - 1))
    assert last.limit_bytes == limit_bytes


def test_a_limit_that_nothing_keeps_is_said() -> None:
    with pytest.raises(PlanError, match=r"expected a limit of at least [0-9]+ bytes"):
        list(PlannerProcess().plans(request(1000)))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_planner_that_is_killed_is_an_error_and_leaves_nothing(when: str) -> None:
    process = PlannerProcess()
    if when == "before":
        process.kill()
    answers = process.plans(request(PEAK_BYTES // 2, trace=gpt_trace(layers=40)))
    killing = (process.kill() for _ in answers)
    with pytest.raises((PlanError, OSError)):
        list(killing)
    process.kill()  # again
    assert process._process.poll() is not None
    assert not Path(f"/proc/{process._process.pid}").exists()
