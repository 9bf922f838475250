"""What a plan says of its memory: copies out that have not ended are waited for, where that takes no time."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.plan.random_traces import chained_traces
from tests.plan.test_simulator import made, swap, trace_of, with_host
from torch_lms.errors import LimitError
from torch_lms.plan import Trace, make_plan, simulate
from torch_lms.plan.predict import timed_within

# The host is at the op that needs 40 bytes while what 20 of them are for is still copied out.
AHEAD = with_host(trace_of([10, 30, 30, 10], made(0, 20, 3), made(2, 20, 3, released=3)), [1, 1, 1, 1], waits=(3,))


def test_what_is_on_its_way_out_makes_no_peak_where_waiting_for_it_takes_no_time() -> None:
    assert simulate(AHEAD, [swap(0, 0)], 60).peak_bytes == 60
    found = timed_within(AHEAD, [swap(0, 0)], 60)
    assert found.peak_bytes == max(found.planned_bytes) == 40
    assert found.step_us == simulate(AHEAD, [swap(0, 0)], 60).step_us


def test_it_may_have_up_to_the_limit_where_waiting_takes_time() -> None:
    trace = trace_of([10, 30, 30, 90, 10], made(0, 20, 4), made(2, 20, 3, released=3))
    ahead = with_host(trace, [1] * 5, waits=(4,))
    slow = replace(ahead, link=replace(ahead.link, out_bytes_per_us=0.2))
    waiting, free = (simulate(slow, [swap(0, 0)], limit_bytes) for limit_bytes in (20, 40))
    assert waiting.step_us > 1.01 * free.step_us
    assert timed_within(slow, [swap(0, 0)], 40).memory_bytes == free.memory_bytes


def test_what_keeps_no_limit_says_so() -> None:
    assert timed_within(AHEAD, [swap(0, 0)], 30).excess_bytes == 10


@given(trace=chained_traces(), share=st.floats(0.3, 0.95))
@settings(max_examples=40, deadline=None)
def test_a_plan_has_room_for_the_copies_out_that_it_predicts(trace: Trace, share: float) -> None:
    ahead = with_host(trace, [0.01] * len(trace.ops), waits=(len(trace.ops) - 1,))
    try:
        plan = make_plan(ahead, int(simulate(trace, []).peak_bytes * share), simply=True)
    except LimitError:
        assume(False)
    line, peak_bytes = plan.timeline, plan.predicted.peak_bytes
    assert max(line.memory_bytes) == peak_bytes <= plan.limit_bytes
    assert [peak_bytes - room for room in plan.room_bytes()] == [
        used - leaving for used, leaving in zip(line.memory_bytes, line.leaving_bytes, strict=True)
    ]
    assert all(leaving <= room for leaving, room in zip(line.leaving_bytes, plan.room_bytes(), strict=True))
