"""Blocks that are held for a cycle's largest storages."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.traces import Program, gpt_trace
from torch_lms.errors import LimitError, PlanError
from torch_lms.plan import Plan, Trace, simulate
from torch_lms.plan.pieces import Request, plan_in_pieces
from torch_lms.plan.placeholders import Placeholder, find_placeholders, with_placeholders

MIB = 2**20
LOGITS = 64 * MIB


def with_logits(layers: int = 8) -> Trace:
    """Layers whose outputs backward reads, and three large storages in the middle, two of them at once."""
    program = Program()
    kept = [program.lasting(4 * MIB)]
    for _ in range(layers):
        kept += program.op("layer", 100.0, reads=kept[-1:], makes=[8 * MIB])
    (logits,) = program.op("head", 100.0, reads=kept[-1:], makes=[LOGITS])
    (chances,) = program.op("softmax", 100.0, reads=[logits], makes=[LOGITS])
    program.release(logits)
    program.phase = "backward"
    (back,) = program.op("softmax_backward", 100.0, reads=[chances], makes=[LOGITS])
    program.release(chances)
    for layer in reversed(kept):
        (made,) = program.op("layer_backward", 200.0, reads=[back, layer], makes=[8 * MIB])
        program.release(back, *(() if layer == kept[0] else (layer,)))
        back = made
    return program.trace()


TRACE = with_logits()
PLAIN = simulate(TRACE, []).memory_bytes
PEAK = max(PLAIN)


def memory_bytes_of(trace: Trace) -> list[int]:
    return simulate(trace, []).memory_bytes


def planned(limit_bytes: int, margin_bytes: int = 32 * MIB) -> Plan:
    return plan_in_pieces(Request(trace=TRACE, limit_bytes=limit_bytes, margin_bytes=margin_bytes), simply=True)


def test_the_largest_are_held_until_they_are_made_and_one_block_serves_several() -> None:
    found = find_placeholders(TRACE, [], PLAIN, PEAK, PEAK)
    assert found == [Placeholder(bytes=LOGITS, until=8), Placeholder(bytes=LOGITS, until=9)]
    held = memory_bytes_of(with_placeholders(TRACE, found))
    assert [more - used for used, more in zip(PLAIN, held, strict=True)] == [2 * LOGITS] * 8 + [LOGITS] + [0] * 11


def test_where_memory_is_not_crowded_nothing_is_held() -> None:
    assert find_placeholders(TRACE, [], PLAIN, 4 * PEAK, 4 * PEAK) == []


def test_where_memory_is_full_for_a_while_they_are_held_from_the_first_place_with_room_on() -> None:
    trace = with_logits(layers=100)
    used = memory_bytes_of(trace)
    most_bytes = max(used)
    used[:20] = [most_bytes - LOGITS] * 20  # room for one
    used[10] = most_bytes
    first, second = find_placeholders(trace, [], used, most_bytes, most_bytes)
    assert (first.since, second.since) == (11, 20)
    held = memory_bytes_of(with_placeholders(trace, [first, second]))
    more = [with_them - without for with_them, without in zip(held, memory_bytes_of(trace), strict=True)]
    assert more == [0] * 11 + [LOGITS] * 9 + [2 * LOGITS] * 80 + [LOGITS] + [0] * (len(used) - 101)


def test_where_there_is_room_only_just_before_they_are_held_from_the_beginning_on() -> None:
    trace = with_logits(layers=100)
    used = memory_bytes_of(trace)
    used[:50] = [max(used)] * 50
    assert [one.since for one in find_placeholders(trace, [], used, max(used), max(used))] == [0, 0]


def test_a_plan_without_a_margin_has_to_be_faster_by_as_much_as_a_wait_may_take() -> None:
    limit_bytes = PEAK * 7 // 10
    request = Request(trace=TRACE, limit_bytes=limit_bytes, margin_bytes=limit_bytes // 32)
    full, less = (request.planner(limit).plan() for limit in (limit_bytes, limit_bytes - limit_bytes // 32))
    assert full.predicted.step_us < less.predicted.step_us == request.judged_us(less)
    assert request.judged_us(full) == pytest.approx(1.04 * full.predicted.step_us)


def test_a_plan_that_moves_nothing_holds_nothing() -> None:
    assert planned(PEAK + 32 * MIB).placeholders == ()


def test_where_they_cost_too_much_fewer_are_held() -> None:
    made = [len(planned(limit_bytes).placeholders) for limit_bytes in range(100 * MIB, PEAK + 32 * MIB, 8 * MIB)]
    assert made == sorted(made)
    assert {0, 1, 2} == {*made}


@settings(max_examples=30, deadline=None)
@given(share=st.floats(0.3, 1.2), layers=st.integers(1, 5), margin=st.integers(0, 64))
def test_what_is_held_fits_beside_what_is_in_use(share: float, layers: int, margin: int) -> None:
    trace = gpt_trace(layers=layers, width=128, tokens=256, vocabulary=4000)
    limit_bytes = int(max(memory_bytes_of(trace)) * share)
    request = Request(trace=trace, limit_bytes=limit_bytes, margin_bytes=min(margin * MIB, limit_bytes // 8))
    try:
        plan = plan_in_pieces(request, simply=True)
    except LimitError:
        return
    decided = [one for one in plan.decisions if one.decision != "keep"]
    without = simulate(trace, decided, limit_bytes).planned_bytes
    for place, used in enumerate(without):
        held = sum(one.bytes for one in plan.placeholders if one.since <= place < one.until)
        assert used + held <= plan.timeline.memory_bytes[place] <= limit_bytes, place
    assert plan.predicted.peak_bytes == max(plan.timeline.memory_bytes) <= limit_bytes
    assert plan.ops == trace.ops
    assert list(plan.timeline.plain_bytes) == memory_bytes_of(trace)


def test_they_are_in_the_document_and_checked() -> None:
    plan = planned(PEAK - 24 * MIB)
    assert Plan.from_json(plan.to_json()) == plan
    document = json.loads(plan.to_json())
    document["placeholders"][0]["until"] = len(TRACE.ops)
    with pytest.raises(PlanError, match=r"expected a place from 1 to \d+ at placeholders\[0\].until, found"):
        Plan.from_json(json.dumps(document))
    with pytest.raises(PlanError, match="placeholders"):
        replace(plan, placeholders=(Placeholder(bytes=1, until=0),))
    with pytest.raises(PlanError, match=r"expected a place from 0 to 4 at placeholders\[0\].since, found 5"):
        replace(plan, placeholders=(Placeholder(bytes=1, until=5, since=5),))


def test_in_a_plan_of_the_second_version_they_are_held_from_the_beginning_on() -> None:
    plan = planned(PEAK - 24 * MIB)
    document = json.loads(plan.to_json()) | {"version": 2}
    for one in document["placeholders"]:
        del one["since"]
    assert Plan.from_json(json.dumps(document)) == plan
    assert {one.since for one in plan.placeholders} == {0}
