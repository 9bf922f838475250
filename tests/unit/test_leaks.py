"""Thousands of steps leave nothing behind."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

import torch_lms
from tests.unit.planned_programs import wait_for_planner
from torch_lms.swap import mlms

pytestmark = pytest.mark.slow

STEPS = 10_000
WARM_UP = 1_500  # pools, tables and caches have grown
WARM_UP_PLANNED = 150
ALLOWANCE_BYTES = 24 << 20
COPIES_BYTES = 1 << 20  # of storages that have died since the last cycle ended
OUT_ALLOWANCE = 8  # what is out at the end of a step depends on how fast copies are
TABLE_ALLOWANCE = 64 * 64  # dead storages are swept when a shard of the table has grown by so many


@dataclass(frozen=True)
class Held:
    """What this process holds."""

    files: int
    threads: int
    objects: int
    private_bytes: int
    host_bytes: int
    host_used_bytes: int
    paged_out_storages: int
    tracked_storages: int


def private_bytes() -> int:
    """Resident memory without mapped files: the spill file's pages come and go as the system likes."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def held() -> Held:
    torch_lms.wait()
    gc.collect()
    stats = torch_lms.stats()
    return Held(
        files=len(os.listdir("/proc/self/fd")),
        threads=len(os.listdir("/proc/self/task")),
        objects=len(gc.get_objects()),
        private_bytes=private_bytes(),
        host_bytes=stats.host_bytes,
        host_used_bytes=stats.host_used_bytes,
        paged_out_storages=stats.paged_out_storages,
        tracked_storages=stats.tracked_storages,
    )


def check_nothing_grows(step: Callable[[int], object], steps: int, warm_up: int = WARM_UP) -> None:
    for number in range(warm_up):
        step(number)
    before = held()
    for number in range(warm_up, steps):
        step(number)
    after = held()
    assert after.files == before.files
    assert after.threads <= before.threads
    assert after.objects < before.objects + 200
    assert after.private_bytes < before.private_bytes + ALLOWANCE_BYTES
    assert after.host_bytes == before.host_bytes
    assert after.host_used_bytes <= before.host_used_bytes + COPIES_BYTES
    assert after.paged_out_storages <= before.paged_out_storages + OUT_ALLOWANCE
    assert after.tracked_storages <= max(before.tracked_storages, TABLE_ALLOWANCE)


def out_used_freed(number: int) -> None:
    tensor = torch.full((2000,), float(number))
    torch_lms.pageout(tensor)
    torch_lms.wait()
    assert tensor[-1].item() == number


def freed_while_out(number: int) -> None:
    tensor = torch.full((2000,), float(number))
    torch_lms.pageout(tensor)
    if number % 2:
        torch_lms.wait()


def freed_while_coming_in(number: int) -> None:
    tensor = torch.full((2000,), float(number))
    torch_lms.pageout(tensor)
    torch_lms.wait()
    torch_lms.prefetch(tensor)


def refused(number: int) -> None:
    tensor = torch.full((2000,), float(number))
    torch_lms.pin(tensor)
    with pytest.raises(torch_lms.errors.PageoutError):
        torch_lms.pageout(tensor)


def environment(number: int) -> None:
    tensor = torch.full((2000,), float(number))
    mlms.create_swap_env()
    mlms.prefetch_init()
    mlms.pageout_manual(tensor)
    mlms.before_prefetch_wait_all()
    mlms.need_prefetch(tensor)
    mlms.prefetch_all()
    mlms.close_swap_env()


@pytest.mark.parametrize(
    ("step", "steps"),
    [
        (out_used_freed, STEPS),
        (freed_while_out, STEPS),
        (freed_while_coming_in, 5000),
        (refused, 5000),
        (environment, 3000),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_small_cycle_leaks_nothing(step: Callable[[int], object], steps: int, paged: ModuleType) -> None:
    check_nothing_grows(step, steps)


def test_training_in_automatic_mode_leaks_nothing(paged: ModuleType) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
    optimizer = torch.optim.Adam(model.parameters(), 0.001, foreach=True)
    given = torch.randn(256, 64)

    def step(number: int) -> None:
        if number < WARM_UP_PLANNED:  # the plan is made, and made again
            wait_for_planner()
        optimizer.zero_grad()
        model(given).square().mean().backward()
        optimizer.step()

    paged.enable(limit="700KiB", min_bytes=1 << 12)
    check_nothing_grows(step, 450, warm_up=WARM_UP_PLANNED)
    assert paged.stats().pageouts > 0
