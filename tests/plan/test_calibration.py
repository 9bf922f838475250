"""Times of a trace that are made to fit what a plan's cycles have taken."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.plan.random_traces import chained_traces
from tests.plan.test_simulator import made, trace_of, with_host
from torch_lms.errors import LimitError
from torch_lms.plan import Link, Plan, Recipe, Trace, make_plan, simulate
from torch_lms.plan.calibration import calibrated
from torch_lms.plan.predict import priced_again


def plan_of(trace: Trace, share: float) -> Plan:
    try:
        return make_plan(trace, int(simulate(trace, []).peak_bytes * share), simply=True)
    except LimitError:
        assume(False)
        raise


def step_us(trace: Trace, plan: Plan) -> float:
    return priced_again(plan, trace).predicted.step_us


@given(trace=chained_traces(), share=st.floats(0.3, 0.95), times=st.floats(0.8, 0.99), with_times=st.booleans())
@settings(max_examples=40, deadline=None)
def test_times_are_made_shorter_until_the_plan_takes_what_it_took(
    trace: Trace, share: float, times: float, with_times: bool
) -> None:
    timed = with_host(trace, [0.1] * len(trace.ops)) if with_times else trace
    plan = plan_of(timed, share)
    took_us = times * step_us(timed, plan)
    found = calibrated(timed, plan, took_us)
    assert step_us(found, plan) == pytest.approx(took_us, rel=0.01)
    ratios = {
        one.duration_us / two.duration_us for one, two in zip(found.ops, timed.ops, strict=True) if two.duration_us
    }
    assert max(ratios) == pytest.approx(min(ratios))
    assert 0.75 <= min(ratios) < 1
    link_ratio = found.link.in_us(1000) / timed.link.in_us(1000)
    assert link_ratio == pytest.approx(1) or link_ratio == pytest.approx(min(ratios))  # copies alone may take as long


def test_all_times_are_shorter_by_as_much() -> None:
    timed = with_host(trace_of([100, 200, 100]), [10, 20, 30], waits=(2,))
    plan = make_plan(timed, 1000)
    found = calibrated(timed, plan, 0.9 * step_us(timed, plan))
    assert [op.duration_us for op in found.ops] == pytest.approx([90, 180, 90], rel=0.01)
    assert list(found.host.op_us) == pytest.approx([9, 18, 27], rel=0.01)


def test_where_copies_alone_take_longer_the_link_is_faster() -> None:
    link = Link(out_bytes_per_us=1, in_bytes_per_us=2, latency_us=10)
    timed = trace_of([1, 1, 1, 1], made(0, 200, 3), made(1, 200, 2), link=link)
    plan = make_plan(timed, 200)
    found = calibrated(timed, plan, 0.9 * step_us(timed, plan))
    rates = (found.link.out_bytes_per_us, found.link.in_bytes_per_us, found.link.latency_us)
    assert rates == pytest.approx((1 / 0.9, 2 / 0.9, 9), rel=0.01)


def test_only_the_host_is_slower_than_it_was_timed() -> None:
    timed = with_host(trace_of([10, 20, 10]), [100, 200, 100])
    plan = make_plan(timed, 1000)
    found = calibrated(timed, plan, 1.2 * step_us(timed, plan))
    assert found.ops == timed.ops
    assert list(found.host.op_us) == pytest.approx([120, 240, 120], rel=0.01)


@pytest.mark.parametrize("times", [0.0, 0.5, 1.003, 2.0])
def test_what_is_not_known_or_near_or_far_changes_nothing(times: float) -> None:
    timed = with_host(trace_of([10, 20, 10]), [100, 200, 100])
    plan = make_plan(timed, 1000)
    assert calibrated(timed, plan, times * step_us(timed, plan)) is timed


def test_no_host_that_is_not_known_gets_slower() -> None:
    timed = trace_of([100, 200, 100])
    plan = make_plan(timed, 1000)
    assert calibrated(timed, plan, 1.2 * step_us(timed, plan)) is timed


def test_recipes_are_shorter_too() -> None:
    timed = trace_of([100, 200, 100], made(0, 20, 2, recipe=Recipe(duration_us=50)))
    plan = make_plan(timed, 1000)
    recipe = calibrated(timed, plan, 0.9 * step_us(timed, plan)).storages[0].recompute
    assert recipe is not None
    assert recipe.duration_us == pytest.approx(45, rel=0.01)
