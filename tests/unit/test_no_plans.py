"""Automatic mode without a plan: where none is wanted, or none can be made, and what is told of it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

import torch_lms
from tests.unit.markers import counts_exactly
from tests.unit.planned_programs import limit_and_results, limit_for, on, plain_training, run, wait_for_planner
from tests.unit.trainings import MIN_BYTES, one_thread
from torch_lms.errors import PlanError
from torch_lms.swap import planning


@counts_exactly
@one_thread()
def test_a_program_is_planned_that_begins_with_a_long_loop_which_no_plan_is_for() -> None:
    """What repeats before the first backward is recorded as a cycle; here it holds more with every turn."""
    limit_bytes, expected = limit_and_results(plain_training)
    on(limit_bytes)
    x = torch.ones(MIN_BYTES // 4)
    kept = [torch.tanh(x) for _ in range(6000)]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        wait_for_planner()
    assert any("no plan was made" in str(warning.message) for warning in warned)
    kept.clear()
    assert list(run(plain_training)) == expected
    assert torch_lms.current_plan() is not None


@counts_exactly
@one_thread()
def test_where_no_plan_could_be_made_the_program_is_recorded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_bytes, expected = limit_and_results(plain_training)
    asked: list[Any] = []

    def fails_once(request: Mapping[str, Any], wishes: planning.Wishes) -> Iterator[dict[str, Any]]:
        asked.append(request)
        if len(asked) == 1:
            raise PlanError("expected an answer, found none")
        return answers(request, wishes)

    answers = planning._answers
    monkeypatch.setattr(planning, "_answers", fails_once)
    on(limit_bytes)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert list(run(plain_training)) == expected
    assert torch_lms.current_plan() is not None
    assert sum("no plan was made" in str(warning.message) for warning in warned) == 1


@counts_exactly
@one_thread()
def test_a_program_without_plans_pages_on_demand() -> None:
    on(limit_for(plain_training), swap=False, recompute=False)
    for _ in run(plain_training):
        pass
    assert torch_lms.current_plan() is None
    assert torch_lms.stats().pageouts > 0


@counts_exactly
@one_thread()
def test_a_limit_that_no_plan_keeps_is_warned_of_with_the_least_one() -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        on(limit_for(plain_training, 0.45), swap=False)
        for _ in run(plain_training):
            pass
    assert any("expected a limit of at least" in str(warning.message) for warning in warned)
    assert torch_lms.current_plan() is None
