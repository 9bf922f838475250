"""The planner as a process of its own."""

from __future__ import annotations

import marshal
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from tests.plan.traces import gpt_trace
from torch_lms.errors import PlanError
from torch_lms.plan import Plan, Trace, least_limit
from torch_lms.plan.calibration import calibrated
from torch_lms.plan.margins import margins
from torch_lms.plan.messages import read_message, write_message
from torch_lms.plan.pieces import Request, bounded, plan_in_pieces
from torch_lms.plan.predict import priced_again
from torch_lms.plan.recording import compile_plan, timed_again
from torch_lms.plan.simulator import simulate
from torch_lms.swap import planner_process
from torch_lms.swap.planner_process import PlannerProcess

TRACE = gpt_trace(layers=4)
PEAK_BYTES = simulate(TRACE, []).peak_bytes


def request(limit_bytes: int, *, trace: Trace = TRACE) -> dict[str, object]:
    return {"trace": trace.to_json().encode(), "limit_bytes": limit_bytes}


def after_steps_of(followed: Plan, times_us: Iterable[float]) -> dict[str, object]:
    """What a request has besides once a plan is followed."""
    return {"times_us": list(times_us), "followed": followed.to_json().encode()}


def plans_of(answers: Iterable[Mapping[str, Any]]) -> list[Plan]:
    return [Plan.from_json(one["plan"]["document"].decode()) for one in answers if "plan" in one]


def said_of(answers: Iterable[Mapping[str, Any]]) -> list[Plan]:
    """What is known in the end of each plan, that of the one that was followed first."""
    found = {one["of"]: Plan.from_json(one["document"]["document"].decode()) for one in answers if "document" in one}
    return [found[number] for number in range(len(found))]


def test_the_trace_comes_first_then_a_plan_soon_and_only_a_better_one_after_it() -> None:
    limit_bytes = PEAK_BYTES // 2
    first, *answers = PlannerProcess().answers(request(limit_bytes))
    assert Trace.from_json(first["trace"].decode()) == TRACE
    soon, *more = plans_of(answers)
    asked = Request(trace=TRACE, limit_bytes=limit_bytes, **margins(TRACE, limit_bytes))
    assert soon == plan_in_pieces(asked, simply=True)
    assert [one.name for one in soon.methods if "left out" in one.note] == ["linear"]
    assert all(plan.predicted.step_us < soon.predicted.step_us for plan in more)
    best = plan_in_pieces(asked, simply=False)
    assert [soon, *more][-1].predicted.step_us <= best.predicted.step_us * 1.01


def test_where_the_margin_leaves_no_plan_it_is_given_up() -> None:
    limit_bytes = least_limit(TRACE)
    *_, last = plans_of(PlannerProcess().answers(request(limit_bytes)))
    assert last.limit_bytes == limit_bytes


def test_a_plan_is_told_with_what_the_core_needs_of_it() -> None:
    _, answer, *_ = PlannerProcess().answers(request(PEAK_BYTES // 2))
    told = answer["plan"]
    plan = Plan.from_json(told["document"].decode())
    assert (told["signature"], told["device"]) == (plan.signature, plan.device)
    assert answer["compiled"] == marshal.loads(marshal.dumps(compile_plan(plan)))


def test_an_answer_that_takes_too_long_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner_process, "_PATIENCE_SECONDS", 0.01)
    with pytest.raises(PlanError, match=r"expected a plan within 0.01 s, found none"):
        list(PlannerProcess().answers(request(PEAK_BYTES // 2, trace=gpt_trace(layers=40))))


def test_a_host_with_room_for_all_that_may_go_out_is_no_limit() -> None:
    free, roomy, short = (
        plans_of(PlannerProcess().answers({**request(PEAK_BYTES // 2), "host_limit_bytes": host_bytes}))[-1]
        for host_bytes in (None, PEAK_BYTES, PEAK_BYTES // 8)
    )
    assert roomy.decisions == free.decisions
    assert short.predicted.host_peak_bytes <= PEAK_BYTES // 8 < free.predicted.host_peak_bytes


def test_the_plan_that_was_followed_is_priced_in_the_new_times() -> None:
    followed = said_of(PlannerProcess().answers(request(PEAK_BYTES // 2)))[-1]
    times_us = [2 * op.duration_us for op in TRACE.ops]
    asked = request(PEAK_BYTES // 2) | after_steps_of(followed, times_us)
    first, second, *rest = PlannerProcess().answers(asked)
    trace = Trace.from_json(first["trace"].decode())
    assert trace == timed_again(TRACE, times_us)
    assert said_of([second]) == [priced_again(followed, trace)]
    found, *_, made = said_of(rest)
    assert found.predicted.lower_bound_us == min(made.predicted.lower_bound_us, found.predicted.step_us)
    assert found.predicted.lower_bound_us >= priced_again(followed, trace).predicted.lower_bound_us
    assert found.decisions == followed.decisions


def test_times_fit_what_the_steps_of_the_plan_have_taken() -> None:
    followed = said_of(PlannerProcess().answers(request(PEAK_BYTES * 3 // 4)))[-1]
    times_us = [1.1 * op.duration_us for op in TRACE.ops]
    asked = request(PEAK_BYTES * 3 // 4) | after_steps_of(followed, times_us)
    took_us = 0.95 * priced_again(followed, timed_again(TRACE, times_us)).predicted.step_us
    first, second, *rest = PlannerProcess().answers(asked | {"step_us": took_us})
    [priced] = said_of([second])
    assert Trace.from_json(first["trace"].decode()) == timed_again(TRACE, times_us)
    assert priced.predicted.step_us == pytest.approx(took_us, rel=0.01)
    made = plans_of(rest)
    assert made[-1].predicted.step_us <= priced.predicted.step_us * 1.01  # by the same times
    fast = calibrated(timed_again(TRACE, times_us), followed, took_us)
    assert all(priced_again(plan, fast).predicted.step_us == plan.predicted.step_us for plan in made)
    assert all(plan.predicted.lower_bound_us > plan.predicted.plain_us for plan in said_of(rest))


def test_a_plan_that_was_followed_within_more_memory_gets_a_bound_of_its_own() -> None:
    """As when it turns out that free memory lies in pieces: what is planned then stays further below the limit."""
    times_us = [op.duration_us for op in TRACE.ops]
    first = Request(trace=timed_again(TRACE, times_us), limit_bytes=PEAK_BYTES * 5 // 8)
    followed = plan_in_pieces(first, simply=True)
    asked = request(PEAK_BYTES // 2) | after_steps_of(followed, times_us)
    found, *_, made = said_of(PlannerProcess().answers(asked))
    assert found.limit_bytes > made.limit_bytes
    assert found.predicted.lower_bound_us == bounded(first, followed).predicted.lower_bound_us
    assert found.predicted.lower_bound_us > found.predicted.plain_us


@pytest.mark.parametrize(("longer", "waits", "more_room"), [(0.05, 1, True), (0.05, 0, False), (0.01, 1, False)])
def test_where_steps_lose_time_to_waits_for_memory_plans_leave_more_room(
    longer: float, waits: float, more_room: bool
) -> None:
    trace = replace(gpt_trace(layers=8, vocabulary=512), device="cuda:0")
    asked = request(simulate(trace, []).peak_bytes * 3 // 4, trace=trace)
    followed = plans_of(PlannerProcess().answers(asked))[-1]
    lost_us = longer * followed.predicted.step_us
    asked |= after_steps_of(followed, [op.duration_us for op in trace.ops])
    asked |= {"step_us": followed.predicted.step_us + lost_us, "wait_us": waits * lost_us}
    made = plans_of(PlannerProcess().answers(asked))[-1]
    assert bool(made.placeholders) == bool(followed.placeholders)
    share = 2 if made.placeholders else 1  # of the room
    more_bytes = max(one.bytes for one in trace.storages) // share
    assert made.limit_bytes == followed.limit_bytes - more_room * more_bytes


def test_a_message_that_ends_too_soon_is_none() -> None:
    file = BytesIO()
    write_message(file, {"some": [1, 2.0, b"three", None]})
    assert read_message(BytesIO(file.getvalue())) == {"some": [1, 2.0, b"three", None]}
    for length in range(len(file.getvalue())):
        assert read_message(BytesIO(file.getvalue()[:length])) is None


def test_a_limit_that_nothing_keeps_is_said() -> None:
    with pytest.raises(PlanError, match=r"expected a limit of at least [0-9]+ bytes"):
        list(PlannerProcess().answers(request(1000)))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("print('x' * (1 << 20), file=sys.stderr); sys.exit('no good')", "^no good$"),
        ("os.kill(os.getpid(), 9)", "ended by SIGKILL"),
        ("sys.exit(3)", "ended with status 3"),
    ],
)
def test_a_planner_that_ends_without_answers_says_why(
    body: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much it has said: a pipe that nobody reads would hold it up for ever."""
    program = tmp_path / "planner"
    program.write_text(f"#!{sys.executable}\nimport os, sys\nsys.stdin.buffer.read()\n{body}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(PlanError, match=message):
        list(PlannerProcess().answers(request(PEAK_BYTES // 2)))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_planner_that_is_killed_is_an_error_and_leaves_nothing(when: str) -> None:
    process = PlannerProcess()
    if when == "before":
        process.kill()
    answers = process.answers(request(PEAK_BYTES // 2, trace=gpt_trace(layers=40)))
    killing = (process.kill() for _ in answers)
    with pytest.raises((PlanError, OSError)):
        list(killing)
    process.kill()  # again
    assert process._process.poll() is not None
    assert not Path(f"/proc/{process._process.pid}").exists()


def test_a_planner_that_ends_before_it_has_the_whole_request_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ImportError: there is no such module' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(PlanError, match="ImportError: there is no such module"):
        list(PlannerProcess().answers({"trace": bytes(1 << 22)}))


def test_a_module_in_the_programs_folder_is_not_the_planners(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ImportError('not this one')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert plans_of(PlannerProcess().answers(request(PEAK_BYTES // 2)))
