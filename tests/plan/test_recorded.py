"""Plans of real programs, forward and backward, recorded on an H200 by `benchmarks.plans` and `benchmarks.plan_models`.

GPT 1.3B, batch 16 x 2048, was recorded when layer norms still counted as writing what they read, so that fewer storages
could be made again. The others have thousands of ops and storages, but for two: GPT with AdamW, which is from
`benchmarks.optimizer_choice`, and a 3D U-Net of 36 volumes, from `benchmarks.largest`, whose convolutions need up to
28.5 GiB for themselves. Only ResNet-152's has the host's times.
"""

from __future__ import annotations

import gzip
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from torch_lms.errors import LimitError
from torch_lms.plan import HOST, SWAP, Plan, Trace, least_limit, make_plan, simulate
from torch_lms.plan.margins import margins
from torch_lms.plan.pieces import Request, plan_in_pieces
from torch_lms.plan.planner import Planner

GIB = 2**30
RECORDED = Path(__file__).parent / "recorded"
LIMITS_GIB = (40, 30, 20, 16, 12, 9)


@cache
def trace(name: str = "gpt_1_3b") -> Trace:
    return Trace.from_json(gzip.decompress((RECORDED / f"{name}_h200.trace.json.gz").read_bytes()).decode())


@cache
def plan(limit_gib: float, *, simply: bool = False) -> Plan:
    return make_plan(trace(), int(limit_gib * GIB), simply=simply)


@pytest.mark.parametrize("limit_gib", LIMITS_GIB)
def test_a_plan_is_near_the_bound_and_does_what_it_says(limit_gib: int) -> None:
    predicted = plan(limit_gib).predicted
    assert predicted.step_us <= 1.01 * predicted.lower_bound_us
    carried_out = simulate(trace(), plan(limit_gib).decisions, limit_gib * GIB)
    assert carried_out.feasible
    assert carried_out.step_us == pytest.approx(predicted.step_us)
    assert carried_out.peak_bytes == predicted.peak_bytes <= limit_gib * GIB


@pytest.mark.parametrize(
    ("name", "share", "most"),
    [
        ("whisper_medium", 0.55, 1.008),
        ("whisper_medium", 0.37, 1.01),
        ("qwen3_moe", 0.55, 1.016),
        ("qwen3_moe", 0.45, 1.02),
        ("qwen3_moe", 0.37, 1.02),
        ("t5_large", 0.55, 1.008),
        ("t5_large", 0.37, 1.01),
    ],
)
def test_a_plan_of_thousands_of_storages_is_near_the_bound(name: str, share: float, most: float) -> None:
    limit_bytes = int(share * simulate(trace(name), []).peak_bytes)
    predicted = make_plan(trace(name), limit_bytes).predicted
    assert predicted.peak_bytes <= limit_bytes
    assert predicted.step_us <= most * predicted.lower_bound_us


def test_less_memory_never_makes_it_faster_nor_holds_more() -> None:
    steps_us = [plan(limit_gib).predicted.step_us for limit_gib in LIMITS_GIB]
    assert all(more <= 1.001 * less for more, less in pairwise(steps_us))
    peaks = [plan(limit_gib).predicted.peak_bytes for limit_gib in LIMITS_GIB]
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize("limit_gib", [30, 9])
def test_the_plan_that_comes_soon_is_nearly_as_good(limit_gib: int) -> None:
    assert plan(limit_gib, simply=True).predicted.step_us <= 1.03 * plan(limit_gib).predicted.step_us


def test_of_a_models_state_the_largest_storages_stay() -> None:
    recorded = trace("gpt_1_3b_adamw")
    found = make_plan(recorded, int(11.5 * GIB), simply=True)
    moved = {one.storage for one in found.decisions if one.decision == SWAP and recorded.storages[one.storage].lasting}
    assert max(recorded.storages[one].bytes for one in moved) == 64 << 20 < recorded.storages[0].bytes
    assert found.predicted.step_us <= 1.03 * found.predicted.lower_bound_us


def test_recompute_alone_needs_more_memory_and_says_how_much() -> None:
    with pytest.raises(LimitError, match="expected a limit of at least"):
        make_plan(trace(), 16 * GIB, swap=False)


def test_the_least_limit_of_recompute_alone_is_not_above_what_plans_keep() -> None:
    limit_bytes = 9 * GIB
    assert make_plan(trace("whisper_medium"), limit_bytes, swap=False, simply=True).predicted.peak_bytes <= limit_bytes
    assert least_limit(trace("whisper_medium"), swap=False) <= limit_bytes


def test_where_ops_need_much_for_themselves_plans_are_found_and_beat_copies_alone() -> None:
    recorded, limits_gib = trace("unet3d"), (19, 21, 22, 24, 26, 30, 40)
    plans = [make_plan(recorded, limit_gib * GIB, host_limit_bytes=85 * GIB) for limit_gib in limits_gib]
    assert all(one.method != "pressed" for one in plans)
    assert all(simulate(recorded, one.decisions, one.limit_bytes).feasible for one in plans)
    steps_us = [one.predicted.step_us for one in plans]
    assert steps_us == sorted(steps_us, reverse=True)
    copied_us = [
        make_plan(recorded, limit_gib * GIB, host_limit_bytes=85 * GIB, recompute=False).predicted.step_us
        for limit_gib in (22, 30, 40)
    ]
    ours_us = [steps_us[limits_gib.index(limit_gib)] for limit_gib in (22, 30, 40)]
    assert all(ours <= 0.85 * copied for ours, copied in zip(ours_us, copied_us, strict=True))


def test_room_for_memory_in_pieces_does_not_have_ops_read_more_from_the_host() -> None:
    limit_bytes, host_limit_bytes = 24 * GIB, 85 * GIB
    room = margins(trace("unet3d"), limit_bytes)
    request = Request(trace=trace("unet3d"), limit_bytes=limit_bytes, host_limit_bytes=host_limit_bytes, **room)

    def served(plan: Plan) -> int:
        return sum(one.decision == HOST for one in plan.decisions)

    below_bytes = limit_bytes - room["margin_bytes"]
    near = make_plan(trace("unet3d"), below_bytes, host_limit_bytes, simply=True)
    far = make_plan(trace("unet3d"), below_bytes - room["pieces_bytes"], host_limit_bytes, simply=True)
    assert served(near) < served(far)
    assert served(plan_in_pieces(request, simply=True)) == served(near)


@pytest.mark.parametrize("limit_gib", [8.14, 8.6, 9.5])
def test_where_the_host_would_wait_for_copies_methods_plan_for_less_memory(limit_gib: float) -> None:
    predicted = make_plan(trace("resnet_152_followed"), int(limit_gib * GIB), simply=True).predicted
    assert predicted.step_us - predicted.recompute_us <= 1.01 * predicted.plain_us
    assert predicted.waits_us < 0.001 * predicted.step_us  # it is not compute that would wait


def test_of_plans_that_take_as_long_the_one_is_taken_that_a_slower_host_holds_up_less() -> None:
    timed, limit_bytes = trace("resnet_152"), int(12.4 * GIB)
    slower = replace(timed, host=timed.host.slower(1.5))
    planner = Planner(timed, limit_bytes)
    best = planner.plan()
    others = [planner.plan(only=one.name) for one in best.methods if one.step_us is not None]
    took_us, slow_us = (
        {plan.method: simulate(on, plan.decisions, limit_bytes).step_us for plan in others} for on in (timed, slower)
    )
    fastest = min(took_us, key=lambda name: took_us[name])
    assert best.predicted.step_us <= 1.01 * took_us[fastest]
    assert slow_us[best.method] <= 0.985 * slow_us[fastest]
    judged_of = {plan.method: planner.judged_us(plan) for plan in others}
    assert judged_of[best.method] == min(judged_of.values())
    assert judged_of[fastest] == pytest.approx((took_us[fastest] + slow_us[fastest]) / 2)
