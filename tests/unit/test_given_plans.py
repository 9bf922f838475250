"""Plans that are given to automatic mode: what an earlier run has saved, and what is refused or does no harm."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import torch_lms
from tests.plan.traces import gpt_trace
from tests.unit.error_messages import raises_saying
from tests.unit.fresh_process import in_fresh_process
from tests.unit.markers import counts_exactly
from tests.unit.planned_programs import (
    PROGRAMS,
    STEPS,
    limit_and_results,
    limit_for,
    plain_training,
    run,
    wait_for_planner,
)
from tests.unit.trainings import MIN_BYTES, one_thread
from torch_lms._core import core
from torch_lms.errors import LmsError, PlanError
from torch_lms.plan import Plan, make_plan, simulate
from torch_lms.plan.decision import KEEP, RECOMPUTE
from torch_lms.plan.placeholders import Placeholder
from torch_lms.plan.recording import compile_plan

TRACE = gpt_trace(layers=2, width=256, tokens=1024, vocabulary=1000)
OPS = tuple(replace(op, key=place + 1) for place, op in enumerate(TRACE.ops))
SYNTHETIC = replace(make_plan(TRACE, simulate(TRACE, []).peak_bytes // 2), device="cpu", ops=OPS)
PLANNED_WITHIN_S = 150  # a plan is made on whatever is left of the machine
PEAK_BYTES = SYNTHETIC.predicted.peak_bytes


def planned(program: str, limit_bytes: int, **options: bool) -> Plan:
    """What a first run comes to."""
    torch_lms.enable({"cpu": limit_bytes}, min_bytes=MIN_BYTES, **options)
    for _ in run(PROGRAMS[program]):
        pass
    plan = torch_lms.current_plan()
    torch_lms.disable()
    assert plan is not None
    return plan


def started_with(plan: Plan | Path, limit_bytes: int, **options: bool) -> Iterator[list[str]]:
    """The steps of `plain_training`."""
    torch_lms.enable({"cpu": limit_bytes}, min_bytes=MIN_BYTES, plan=plan, **options)
    torch_lms.stats(reset=True)
    return run(plain_training)


def save_a_plan(path: Path) -> int:
    """The limit for which it is."""
    with one_thread():
        limit_bytes = limit_for(plain_training, 0.7)
        planned("training", limit_bytes, swap=False).save(path)
    return limit_bytes


def without_figures(plan: Plan | None) -> Plan:
    """What a run has not measured."""
    assert plan is not None
    return replace(plan, measured=None)


def recomputed_bytes_of_a_second_run(path: Path, limit_bytes: int, expected: list[list[str]]) -> list[int]:
    """By step."""
    given, recomputed = Plan.load(path), []
    with one_thread():
        for made, same in zip(started_with(path, limit_bytes, swap=False), expected, strict=True):
            assert made == same
            assert without_figures(torch_lms.current_plan()) == without_figures(given)
            recomputed.append(torch_lms.stats(reset=True).recomputed_bytes)
    assert core.share_in_step() > 0.95
    return recomputed


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A plan, and the limit that it is for."""
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    return path, in_fresh_process(save_a_plan, path, within_s=PLANNED_WITHIN_S)


@counts_exactly
@one_thread()
def test_a_second_run_starts_planned(saved: tuple[Path, int]) -> None:
    (path, limit_bytes), expected = saved, list(run(plain_training))
    recomputed = in_fresh_process(recomputed_bytes_of_a_second_run, path, limit_bytes, expected)
    assert len(recomputed) == STEPS
    assert all(recomputed[1:])  # the first step ends the first cycle: which one it is nobody knows before


def memory_before_layers(plan: Plan, limit_bytes: int) -> list[int]:
    """In use in the last of some steps with a plan."""
    in_use: list[int] = []
    hook = nn.modules.module.register_module_forward_pre_hook(
        lambda _module, _given: in_use.append(torch_lms.stats().allocated_bytes)
    )
    try:
        for _ in started_with(plan, limit_bytes):
            wait_for_planner()
            last, in_use = in_use, []
    finally:
        hook.remove()
    torch_lms.disable()
    return last


@counts_exactly
@one_thread()
def test_a_block_is_held_from_its_place_on_and_not_before(saved: tuple[Path, int]) -> None:
    (path, limit_bytes), block_bytes = saved, 1 << 16
    plan = Plan.load(path)
    layers = [place for place, op in enumerate(plan.ops) if op.name == "aten::gelu"]
    since, until = layers[1], layers[-2]
    held = replace(plan, placeholders=(Placeholder(bytes=block_bytes, since=since, until=until),))
    without = memory_before_layers(replace(plan, placeholders=()), limit_bytes + block_bytes)
    with_it = memory_before_layers(held, limit_bytes + block_bytes)
    more = [size for size, _ in groupby(one - other for one, other in zip(with_it, without, strict=True))]
    assert (len(more), more[0], more[2]) == (3, 0, 0)
    assert block_bytes <= more[1] <= block_bytes + 64  # the allocator's alignment


def mixed_up(plan: Plan, seed: int) -> Plan:
    """The plan with other storages' numbers in every fourth place."""
    draw = random.Random(seed)

    def other(number: int) -> int:
        return draw.randrange(len(plan.recurring)) if draw.random() < 0.25 else number

    ops = (
        replace(op, inputs=tuple(map(other, op.inputs)), outputs=tuple(dict.fromkeys(map(other, op.outputs))))
        for op in plan.ops
    )
    return replace(plan, ops=tuple(ops))


@counts_exactly
@one_thread()
@pytest.mark.parametrize("seed", range(4))
def test_a_plan_that_mixes_storages_up_changes_no_bit(seed: int, saved: tuple[Path, int]) -> None:
    (path, limit_bytes), expected = saved, list(run(plain_training))
    assert list(started_with(mixed_up(Plan.load(path), seed), limit_bytes)) == expected


@counts_exactly
@one_thread()
def test_a_plan_is_in_use_until_automatic_mode_ends() -> None:
    torch_lms.enable({"cpu": PEAK_BYTES}, plan=SYNTHETIC)
    assert torch_lms.current_plan() == SYNTHETIC
    torch_lms.disable()
    assert torch_lms.current_plan() is None


@counts_exactly
@one_thread()
@pytest.mark.parametrize("program", ["synthetic", "batch norm", "in place", "adversarial"])
def test_the_plan_of_another_program_changes_nothing_but_speed(program: str) -> None:
    limit_bytes, expected = limit_and_results(plain_training)
    limit_bytes = max(limit_bytes, limit_for(PROGRAMS.get(program, plain_training)))
    other = replace(SYNTHETIC, predicted=replace(SYNTHETIC.predicted, peak_bytes=limit_bytes))
    if program != "synthetic":
        other = planned(program, limit_bytes)
    for number, (made, same) in enumerate(zip(started_with(other, limit_bytes), expected, strict=True)):
        assert made == same, f"step {number}"
    assert torch_lms.stats().peak_allocated_bytes <= limit_bytes


@pytest.mark.parametrize(
    ("wrong", "options", "found", "do"),
    [
        ({"device": "cuda:7"}, {}, "one for cuda:7", "limit that device, or leave plan= out"),
        ({}, {"limit": PEAK_BYTES - 1}, f"a peak of {PEAK_BYTES} bytes", "raise the limit, or leave plan= out"),
        ({"limit_bytes": -1}, {}, "-1", "correct this field"),
        ({}, {"swap": False}, "one with drop_unchanged and swap", "allow it, or leave plan= out"),
        ({}, {"recompute": False}, "one with recompute", "allow it, or leave plan= out"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused(
    wrong: dict[str, Any], options: dict[str, int], found: str, do: str
) -> None:
    limit_bytes = options.pop("limit", PEAK_BYTES)
    with raises_saying(PlanError, found=found, do=do):
        torch_lms.enable({"cpu": limit_bytes}, plan=replace(SYNTHETIC, **wrong), **options)
    assert not torch_lms.swap.is_enabled()


@pytest.mark.parametrize(
    ("options", "found", "do"),
    [
        ({"plan": 5}, "5", "pass one, or leave it out"),
        ({"plan": b"plan.json"}, "b'plan.json'", "pass one, or leave it out"),
        ({"swap": "no"}, "'no'", "pass one of them"),
        ({"recompute": None}, "None", "pass one of them"),
    ],
)
def test_what_is_no_plan_and_no_wish_is_refused(options: dict[str, Any], found: str, do: str) -> None:
    with raises_saying(PlanError, found=found, do=do):
        torch_lms.enable({"cpu": PEAK_BYTES}, **options)
    assert not torch_lms.swap.is_enabled()


@pytest.mark.parametrize(
    ("text", "found", "do"),
    [
        (None, "No such file", "give a file with a plan"),
        ("{", "text that is not", "write the file again"),
        (TRACE.to_json(), "'torch_lms.trace'", "give another file"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(text: str | None, found: str, do: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    with raises_saying(PlanError, found=found, do=do):
        torch_lms.enable({"cpu": PEAK_BYTES}, plan=path)
    assert not torch_lms.swap.is_enabled()


@counts_exactly
@one_thread()
def test_there_is_no_plan_once_paging_on_demand_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_bytes = limit_for(plain_training, 0.7)
    steps = started_with(planned("training", limit_bytes), limit_bytes)
    next(steps)
    assert torch_lms.current_plan() is not None
    monkeypatch.setattr("torch_lms.swap.planning.core.pages_on_demand", lambda: True)
    assert torch_lms.current_plan() is None


@pytest.mark.parametrize("name", ["inputs", "outputs", "remade", "drops", "drops_again", "pageouts", "prefetches"])
@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([], "ends too soon"),
        ([1], "ends too soon"),
        ([-1], "ends too soon"),
        ([1, 10**6], "found 1000000"),
        ([1, -1], "found -1"),
    ],
)
def test_lists_that_are_no_plan_s_are_refused(name: str, numbers: list[int], expected: str) -> None:
    compiled = compile_plan(SYNTHETIC) | {"signature": "a#1", "timed": True, name: array("i", numbers).tobytes()}
    with pytest.raises(LmsError, match=f"expected in '{name}' .*{expected}"):
        core.add_plan(compiled)


def test_only_what_is_dropped_keeps_a_recipe() -> None:
    dropped = next(one for one in SYNTHETIC.decisions if one.decision == RECOMPUTE)
    stays = next(one for one in SYNTHETIC.decisions if one.decision == KEEP)
    both = replace(SYNTHETIC.ops[0], outputs=(stays.storage, dropped.storage))
    compiled = compile_plan(replace(SYNTHETIC, ops=(both, *SYNTHETIC.ops[1:])))
    assert array("i", compiled["remade"])[:2].tolist() == [1, dropped.storage]


@pytest.mark.parametrize("wrong", [{"binds": bytes(1)}, {"room": bytes(8)}])
def test_lists_of_another_number_of_ops_are_refused(wrong: dict[str, bytes]) -> None:
    compiled = compile_plan(SYNTHETIC) | {"signature": "a#1", "timed": True} | wrong
    with pytest.raises(LmsError, match=f"expected flags and room for {len(SYNTHETIC.ops)} ops"):
        core.add_plan(compiled)
