"""Plans as documents: what comes back, what is refused, and what the core and people are told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from tests.plan.mutations import mutated
from tests.plan.traces import gpt_trace
from torch_lms.errors import PlanError
from torch_lms.plan import KEEP, RECOMPUTE, SWAP, Measured, Plan, make_plan, simulate

TRACE = gpt_trace(layers=2, width=256, tokens=1024, vocabulary=1000)
PLAN = make_plan(TRACE, int(simulate(TRACE, []).peak_bytes * 0.5))
TINY = gpt_trace(layers=1, width=64, tokens=256, vocabulary=100)
SHORT = make_plan(TINY, int(simulate(TINY, []).peak_bytes * 0.6))


def test_a_plan_comes_back(tmp_path: Path) -> None:
    assert Plan.from_json(PLAN.to_json()) == PLAN
    measured = replace(PLAN, measured=Measured(step_us=12.0, peak_bytes=3))
    measured.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == measured


def test_actions_are_the_decisions_by_place() -> None:
    actions = PLAN.actions()
    assert list(actions) == sorted(actions)
    leaving = [one for one in PLAN.decisions if one.decision != KEEP]
    assert leaving
    assert sum(len(one.drop) for one in actions.values()) == sum(one.decision == RECOMPUTE for one in leaving)
    assert sum(len(one.pageout) for one in actions.values()) == sum(one.decision != RECOMPUTE for one in leaving)
    assert sum(len(one.prefetch) for one in actions.values()) == sum(one.in_after is not None for one in leaving)
    for one in leaving:
        assert one.out_after is not None
        after = actions[one.out_after]
        assert one.storage in (after.drop if one.decision == RECOMPUTE else after.pageout)


def test_prefetches_of_a_place_are_in_the_order_of_their_copies() -> None:
    starts = {copy.storage: copy.start_us for copy in PLAN.timeline.copies if copy.direction == "in"}
    several = [after.prefetch for after in PLAN.actions().values() if len(after.prefetch) > 1]
    for prefetch in several:
        assert [starts[one] for one in prefetch] == sorted(starts[one] for one in prefetch)


def test_every_storage_has_a_decision_with_a_reason_and_a_price() -> None:
    assert {one.storage for one in PLAN.decisions} == set(range(len(TRACE.storages)))
    for one in PLAN.decisions:
        assert one.reason.endswith(".")
        assert one.bytes == TRACE.storages[one.storage].bytes
        assert (one.decision == KEEP) == (one.out_after is None)
    recomputed = sum(one.price_us for one in PLAN.decisions if one.decision == RECOMPUTE)
    assert recomputed == pytest.approx(PLAN.predicted.recompute_us)


def test_a_plan_says_what_it_comes_to() -> None:
    text = str(replace(PLAN, measured=Measured(step_us=1500.0, peak_bytes=2**30)))
    assert f"method {PLAN.method}" in text
    assert "measured: 1.5 ms, peak 1.00 GiB" in text
    for kind in {one.decision for one in PLAN.decisions}:
        assert kind in text
    assert len(text.splitlines()) <= 9


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("version", 7, "expected torch_lms.plan of version 3, found version 7"),
        ("format", "torch_lms.trace", "found 'torch_lms.trace'"),
        ("decisions.0.decision", "forget", "at torch_lms.plan.decisions[0].decision, found 'forget'"),
        ("decisions.0.out_after", 10**6, "expected"),
        ("decisions.0.storage", 10**6, "at decisions, found 1000000"),
        ("timeline.copies.0.storage", 10**6, "at timeline.copies, found 1000000"),
        ("ops.0.inputs", [10**6], "at ops[0].inputs, found 1000000"),
        ("ops.0.key", -1, "at torch_lms.plan.ops[0].key, found -1"),
        ("recurring", [True], "expected storages from 0 to 0 at"),
        ("timeline.start_us", [], "in each list of timeline"),
        ("predicted.peak_bytes", 10**400, "at torch_lms.plan.predicted.peak_bytes, found 1000"),
        ("predicted.step_us", None, "at torch_lms.plan.predicted.step_us, found None"),
    ],
)
def test_documents_that_make_no_sense_are_refused(path: str, value: Any, message: str) -> None:
    document = json.loads(PLAN.to_json())
    parent = document
    *steps, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    for step in steps:
        parent = parent[step]
    parent[last] = value
    with pytest.raises(PlanError) as caught:
        Plan.from_json(json.dumps(document))
    assert message in str(caught.value)


@given(document=mutated(json.loads(SHORT.to_json())))
@settings(max_examples=300, deadline=None)
def test_a_changed_document_is_refused_or_is_another_plan(document: dict[str, Any]) -> None:
    message = ""
    try:
        plan = Plan.from_json(json.dumps(document))
    except PlanError as error:
        message = str(error)
    if message:
        assert message.startswith("expected ")
    else:
        assert Plan.from_json(plan.to_json()) == plan


def test_kept_and_moved_storages_are_told_apart() -> None:
    with pytest.raises(PlanError, match="expected out_after for all but keep"):
        replace(PLAN.decisions[0], decision=SWAP, out_after=None, in_after=None)
    with pytest.raises(PlanError, match="expected in_after only for swap and drop_unchanged"):
        replace(PLAN.decisions[0], decision=RECOMPUTE, out_after=1, in_after=2)
