"""Which device's program is planned for, and what holds when `enable` is called again."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from torch_lms._core import core
from torch_lms.swap import SwapEnv, automatic, limits, mlms, planning
from torch_lms.swap.limits import parse_limits
from torch_lms.swap.planning import Wishes

MIB = 1 << 20


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Devices that the core has been asked to plan for, in a process that uses four of them."""
    devices: list[str] = []
    stub = SimpleNamespace(plan_program=lambda device, _: devices.append(device), plan_no_program=devices.clear)
    monkeypatch.setattr(planning, "core", stub)
    monkeypatch.setattr(planning, "measure_link", lambda _: None)
    monkeypatch.setattr(planning, "bring_back_before_forks", lambda: None)
    monkeypatch.setattr(planning, "_wishes", None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    return devices


def begin(**sizes: int) -> None:
    planning.begin(Wishes(limits={name.replace("_", ":"): nbytes for name, nbytes in sizes.items()}))


def limit_of(device: str) -> int | None:
    wishes = planning._wishes
    return None if wishes is None else wishes.limits.get(device)


def test_one_device_is_planned_without_a_word(planned: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        begin(cuda_3=100)
    assert planned == ["cuda:3"]


def test_of_several_the_current_one_is_planned_and_a_warning_names_the_others(planned: list[str]) -> None:
    with pytest.warns(UserWarning, match=r"on cuda:1 is planned for, and cuda:0, cuda:3 pages on demand"):
        begin(cuda_0=100, cuda_1=200, cuda_3=300)
    assert planned == ["cuda:1"]


def test_a_second_device_leaves_the_current_one_its_plan(planned: list[str]) -> None:
    begin(cuda_1=200)
    with pytest.warns(UserWarning, match="cuda:0 pages on demand"):
        begin(cuda_1=200, cuda_0=100)
    assert planned == ["cuda:1", "cuda:1"]
    assert (limit_of("cuda:0"), limit_of("cuda:1")) == (100, 200)
    planning.leave()
    assert planned == []
    assert limit_of("cuda:1") is None


@pytest.mark.parametrize("plans", [True, False])
def test_limits_of_an_earlier_call_hold(monkeypatch: pytest.MonkeyPatch, plans: bool) -> None:
    for name in ("_enabled", "_begun", "_limits", "_options"):
        monkeypatch.setattr(automatic, name, getattr(automatic, name))  # and is that again afterwards
    monkeypatch.setattr(automatic, "core", core := Mock())
    core.memory_report.return_value = {"allocated_bytes": 0}
    monkeypatch.setattr(automatic, "intercepts", Mock())
    monkeypatch.setattr(automatic, "planning", planner := Mock(Wishes=Wishes))
    monkeypatch.setattr(automatic, "optimizers", pieces := Mock())
    monkeypatch.setattr(automatic, "parse_limits", dict)
    automatic.enable({"one": 100})
    automatic.enable({"other": 200}, swap=plans, recompute=plans)
    assert pieces.install.call_args.args == ({"one": 100, "other": 200},)
    assert automatic.present_limits() == {"one": 100, "other": 200}
    if plans:
        assert planner.begin.call_args.args[0].limits == {"one": 100, "other": 200}
    assert [call.args[0] for call in core.enable.call_args_list] == ["one", "other"]


def test_a_bare_limit_is_that_of_the_devices_that_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "core", SimpleNamespace(has_cuda=True, total_bytes=lambda name: 100 + int(name[5:])))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(limits, "_has_context", {2, 5}.__contains__)
    assert parse_limits("100%") == {"cuda:5": 105, "cuda:2": 102}


def training() -> Callable[[], None]:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
    x = torch.randn(2048, 512)

    def step() -> None:
        model(x).square().mean().backward()
        model.zero_grad()

    return step


def test_who_wants_no_plans_any_more_has_none(paged: ModuleType, chaos: bool) -> None:
    if chaos:
        pytest.skip("what goes out at random fits no plan")
    step = training()
    paged.enable({"cpu": 24 * MIB}, min_bytes="16KiB")
    for _ in range(60):
        step()
        if paged.current_plan() is not None:
            break
    assert paged.current_plan() is not None
    paged.enable({"cpu": 28 * MIB}, min_bytes="16KiB", swap=False, recompute=False)
    for _ in range(6):
        step()
        assert paged.current_plan() is None
        assert not planning.is_planning()
    assert paged.stats().limit_bytes == 28 * MIB


def test_a_limit_that_is_set_again_while_a_plan_is_made_has_a_plan_all_the_same(
    paged: ModuleType, monkeypatch: pytest.MonkeyPatch, chaos: bool
) -> None:
    if chaos:
        pytest.skip("what goes out at random fits no plan")
    step, again, asked = training(), 0, 0
    answers = planning._answers

    def answers_after_the_step(request: Mapping[str, Any], wishes: Wishes) -> Iterator[dict[str, Any]]:
        nonlocal asked
        asked += 1
        awaited, deadline = min(asked, 2), time.monotonic() + 20
        for answer in answers(request, wishes):
            while again < awaited and time.monotonic() < deadline:
                time.sleep(0.01)
            yield answer

    monkeypatch.setattr(planning, "_answers", answers_after_the_step)
    paged.enable({"cpu": 24 * MIB}, min_bytes="16KiB")
    for _ in range(200):
        step()
        if planning.is_planning() and again < 2:
            again += 1
            paged.enable({"cpu": 24 * MIB}, min_bytes="16KiB")
        elif again == 2 and paged.current_plan() is not None:
            break
    assert again == 2
    assert paged.current_plan() is not None


def test_plans_keep_to_the_hosts_limit_of_an_earlier_call(
    paged: ModuleType, monkeypatch: pytest.MonkeyPatch, chaos: bool
) -> None:
    if chaos:
        pytest.skip("what goes out at random fits no plan")
    asked: list[int] = []
    monkeypatch.setattr(planning, "_answers", lambda request, _: iter(asked.append(request["host_limit_bytes"]) or ()))
    step = training()
    before = core.memory_report("cpu")["host_limit_bytes"]
    try:
        paged.enable({"cpu": 24 * MIB}, min_bytes="16KiB", host_limit="100MB")
        paged.enable({"cpu": 24 * MIB}, min_bytes="16KiB")
        for _ in range(60):
            step()
            if asked:
                break
    finally:
        paged.disable()
        SwapEnv(host_limit=before)
    assert asked == [85_000_000]


def test_a_changed_limit_leaves_what_was_asked_for(paged: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    paged.enable({"cpu": "2GiB"}, recompute=False, min_bytes="3MiB")
    with monkeypatch.context() as patched:
        calls: list[dict[str, object]] = []
        patched.setattr(automatic, "enable", lambda limit, **options: calls.append(options))
        automatic.change_limit({"cpu": "1GiB"}, host_limit="5GiB")
        paged.disable()
        automatic.change_limit({"cpu": "1GiB"})
    asked, afterwards = calls
    assert afterwards == {}
    assert asked == {
        "min_bytes": "3MiB", "expandable_segments": True, "swap": True, "recompute": False, "host_limit": "5GiB",
    }  # fmt: skip


def test_a_limit_set_by_the_name_of_ibm_lms_leaves_what_was_asked_for(
    paged: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlms, "_lms_limit", None)  # and is that again afterwards
    paged.enable({"cpu": "2GiB"}, recompute=False)
    mlms.set_limit_lms("1GiB" if not torch.cuda.is_available() else None)
    assert planning._wishes is not None
    assert not planning._wishes.recompute


def test_a_size_set_by_the_name_of_ibm_lms_leaves_the_limit(paged: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlms, "_lms_size_bytes", mlms.get_size_lms())
    paged.enable({"cpu": "1GiB"}, min_bytes="16MiB")
    mlms.set_size_lms("4MiB")
    assert paged.stats().limit_bytes == 1 << 30
    paged.disable()
    assert automatic.present_limits() == {}
