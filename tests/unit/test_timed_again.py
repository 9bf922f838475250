"""Other times for a recorded cycle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.plan.traces import gpt_trace
from torch_lms.plan import make_plan, simulate
from torch_lms.plan.predict import priced_again
from torch_lms.plan.recording import host_of, timed_again
from torch_lms.plan.trace import Recipe, TraceOp, TraceStorage

KEYS = 7
RECORDED = gpt_trace(layers=2, width=64, tokens=64, vocabulary=100)
TRACE = replace(RECORDED, ops=tuple(replace(op, key=place % KEYS + 1) for place, op in enumerate(RECORDED.ops)))


def test_ops_take_the_median_of_those_alike_and_recipes_as_long_as_their_ops() -> None:
    times_us = [float(op.key * 100 + place) for place, op in enumerate(TRACE.ops)]
    found = timed_again(TRACE, times_us)
    for key in range(1, KEYS + 1):
        same = [place for place, op in enumerate(TRACE.ops) if op.key == key]
        middle = sorted(times_us[place] for place in same)[(len(same) - 1) // 2 : len(same) // 2 + 1]
        assert {found.ops[place].duration_us for place in same} == {sum(middle) / len(middle)}
    recipes = [(one.recompute, one.producer) for one in found.storages if one.recompute is not None]
    assert recipes
    assert all(recipe.duration_us == found.ops[producer or 0].duration_us for recipe, producer in recipes)
    assert replace(found, ops=TRACE.ops, storages=TRACE.storages, link=TRACE.link) == TRACE
    assert found.link.out_bytes_per_us < TRACE.link.out_bytes_per_us
    assert found.link.in_bytes_per_us < TRACE.link.in_bytes_per_us


def test_recipes_take_as_long_as_their_op_and_those_that_wrote_in_place() -> None:
    recipe = Recipe(duration_us=9.0, rewrites=(1, 3))
    storage = TraceStorage(bytes=1, producer=0, uses=(1, 2, 3, 4), writes=(1, 3, 4), recompute=recipe)
    ops = tuple(TraceOp(name="op", phase="forward", duration_us=1.0, key=place) for place in range(5))
    found = timed_again(replace(TRACE, ops=ops, storages=(storage,)), [10.0 * 2**place for place in range(5)])
    assert found.storages[0].recompute == replace(recipe, duration_us=10.0 + 20.0 + 80.0)


def test_ops_that_have_not_run_keep_their_time() -> None:
    assert timed_again(TRACE, [0.0] * len(TRACE.ops)).ops == TRACE.ops
    times_us = [0.0] * len(TRACE.ops)
    times_us[0] = 5.0
    found = timed_again(TRACE, times_us)
    assert [op.duration_us for op in found.ops if op.key == 1] == [5.0] * sum(op.key == 1 for op in TRACE.ops)
    assert [op.duration_us for op in found.ops if op.key != 1] == [op.duration_us for op in TRACE.ops if op.key != 1]


def test_a_plan_that_stays_predicts_what_its_own_steps_take() -> None:
    limit_bytes = simulate(TRACE, []).peak_bytes * 7 // 10
    plan = make_plan(TRACE, limit_bytes, simply=True)
    assert priced_again(plan, TRACE).predicted.step_us == plan.predicted.step_us
    assert priced_again(plan, TRACE).timeline == plan.timeline
    slower = replace(TRACE, ops=tuple(replace(op, duration_us=2 * op.duration_us) for op in TRACE.ops))
    found = priced_again(plan, slower)
    assert found.predicted.plain_us == 2 * plan.predicted.plain_us
    assert found.predicted.step_us > plan.predicted.step_us
    assert (found.decisions, found.limit_bytes, found.placeholders) == (
        plan.decisions,
        plan.limit_bytes,
        plan.placeholders,
    )
    assert [op.duration_us for op in found.ops] == [op.duration_us for op in slower.ops]


def told(host_us: list[float], caught_up: list[bool]) -> dict[str, Any]:
    actions = {"pageout_us": 1.0, "pagein_us": 2.0, "recompute_us": 3.0}
    return {"host_us": host_us, "caught_up": caught_up, **actions}


def test_where_the_host_was_not_ahead_an_op_takes_no_longer_than_before() -> None:
    trace = replace(TRACE, ops=tuple(replace(op, key=place) for place, op in enumerate(TRACE.ops)))
    times_us = [2 * op.duration_us for op in trace.ops]
    caught_up = [place % 2 == 0 for place in range(len(times_us))]
    found = timed_again(trace, times_us, told([1.0] * len(times_us), caught_up))
    for place, op in enumerate(found.ops):
        assert op.duration_us == trace.ops[place].duration_us * (1 if caught_up[place] else 2)
    assert (found.host.pageout_us, found.host.pagein_us, found.host.recompute_us) == (1.0, 2.0, 3.0)
    assert timed_again(found, times_us).host == found.host


def test_the_host_waits_where_it_was_ahead_and_is_not_any_more() -> None:
    keys = [1, 2, 1, 3, 1, 2]
    found = host_of(keys, told([5.0, 6.0, 5.0, 900.0, 6.0, 6.0], [False, False, False, False, True, False]))
    assert found.waits == (3,)
    assert found.op_us == (5.0, 6.0, 5.0, 6.0, 6.0, 6.0)
    slow = host_of(keys, told([5.0, 6.0, 5.0, 900.0, 6.0, 6.0], [True] * 6))
    assert slow.waits == ()  # it was never ahead: that happened once
    assert slow.op_us[3] == 24.0  # what ops take is 6
    once = host_of([1, 2, 1, 2, 1, 2], told([5.0, 6.0, 5.0, 900.0, 6.0, 6.0], [False] * 4 + [True, False]))
    assert (once.waits, once.op_us[3]) == ((), 24.0)  # the others alike did not wait
    end = host_of([*keys[:5], 4], told([5.0, 6.0, 5.0, 6.0, 6.0, 900.0], [True, *[False] * 5]))
    assert end.waits == (5,)  # the first op of the next cycle finds the device done
