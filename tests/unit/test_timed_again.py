"""Other times for a recorded cycle."""

from __future__ import annotations

from dataclasses import replace

from tests.plan.traces import gpt_trace
from torch_lms.swap.recording import timed_again

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


def test_ops_that_have_not_run_keep_their_time() -> None:
    assert timed_again(TRACE, [0.0] * len(TRACE.ops)).ops == TRACE.ops
    times_us = [0.0] * len(TRACE.ops)
    times_us[0] = 5.0
    found = timed_again(TRACE, times_us)
    assert [op.duration_us for op in found.ops if op.key == 1] == [5.0] * sum(op.key == 1 for op in TRACE.ops)
    assert [op.duration_us for op in found.ops if op.key != 1] == [op.duration_us for op in TRACE.ops if op.key != 1]
