"""What each counter counts and each gauge shows; spans of the profiler; warnings that come once."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import torch_lms
from tests.unit.fresh_process import in_fresh_process
from tests.unit.markers import counts_exactly
from torch_lms.swap import SwapEnv, SwapStats, state

BLOCK_BYTES = 128 << 10
HEADER_BYTES = 64  # the counting allocator's, in front of each block
GAUGES = {
    "paged_out_bytes",
    "paged_out_storages",
    "tracked_storages",
    "host_bytes",
    "host_used_bytes",
    "host_limit_bytes",
    "allocated_bytes",
    "limit_bytes",
}


def block() -> torch.Tensor:
    return torch.ones(BLOCK_BYTES // 4)


@pytest.fixture(scope="module", autouse=True)
def host_is_known() -> None:
    """The first page-out of a process finds out how much the host can take, which `stats` shows from then on."""
    torch_lms.pageout(block())
    torch_lms.wait()


def paged_out(count: int) -> list[torch.Tensor]:
    tensors = [block() for _ in range(count)]
    torch_lms.pageout(tensors)
    torch_lms.wait()
    return tensors


def changes(before: SwapStats, after: SwapStats) -> dict[str, int]:
    """What is not as it was, but for the pool's own growth and the number of storages that are known."""
    pairs = zip(dataclasses.asdict(before).items(), dataclasses.astuple(after), strict=True)
    skipped = ("host_bytes", "tracked_storages")
    return {name: now - was for (name, was), now in pairs if now != was and name not in skipped}


def changed_by(act: Callable[[], object]) -> dict[str, int]:
    before = torch_lms.stats()
    kept = act()
    after = torch_lms.stats()
    del kept
    return changes(before, after)


# --- each field ---------------------------------------------------------------------------------------------


@counts_exactly
def test_page_outs_are_counted_when_they_are_committed(paged: ModuleType) -> None:
    assert changed_by(lambda: paged_out(3)) == {
        "pageouts": 3,
        "pageout_bytes": 3 * BLOCK_BYTES,
        "paged_out_storages": 3,
        "paged_out_bytes": 3 * BLOCK_BYTES,
        "host_used_bytes": 3 * BLOCK_BYTES,
    }


@counts_exactly
def test_a_use_of_what_is_out_is_a_passive_page_in(paged: ModuleType) -> None:
    tensors = paged_out(3)
    assert changed_by(lambda: (tensors[0].sum(), tensors[0].sum())) == {
        "pageins": 1,
        "passive_pageins": 1,
        "pagein_bytes": BLOCK_BYTES,
        "paged_out_storages": -1,
        "paged_out_bytes": -BLOCK_BYTES,
        "host_used_bytes": -BLOCK_BYTES,
    }


@counts_exactly
def test_a_prefetch_that_is_over_in_time_is_a_hit(paged: ModuleType) -> None:
    tensors = paged_out(3)

    def prefetch() -> None:
        paged.prefetch(tensors[:2])
        paged.wait()
        tensors[0].sum()

    assert changed_by(prefetch) == {
        "prefetches": 2,
        "prefetch_hits": 2,
        "pageins": 2,
        "pagein_bytes": 2 * BLOCK_BYTES,
        "paged_out_storages": -2,
        "paged_out_bytes": -2 * BLOCK_BYTES,
        "host_used_bytes": -2 * BLOCK_BYTES,
    }


@counts_exactly
def test_a_prefetch_that_had_not_begun_is_no_hit(paged: ModuleType) -> None:
    (tensor,) = paged_out(1)
    torch_lms._core.core.hold_pageins()
    before = paged.stats()
    torch_lms._core.core.prefetch([tensor], start=False)
    tensor.sum()
    changed = changes(before, paged.stats())
    assert changed["prefetches"] == changed["passive_pageins"] == changed["pageins"] == 1
    assert "prefetch_hits" not in changed
    torch_lms._core.core.start_pageins()


@counts_exactly
def test_a_use_in_time_is_a_cancelled_page_out(paged: ModuleType) -> None:
    tensor = block()
    paged.pageout(tensor)
    tensor.data_ptr()  # no op: nothing commits before the use
    paged.wait()
    assert state(tensor) == "resident"
    stats = paged.stats()
    assert (stats.cancelled_pageouts, stats.pageouts, stats.pageins) == (1, 0, 0)


@counts_exactly
def test_the_end_of_what_is_out_is_no_page_in(paged: ModuleType) -> None:
    tensors = paged_out(3)
    assert changed_by(tensors.clear) == {
        "paged_out_storages": -3,
        "paged_out_bytes": -3 * BLOCK_BYTES,
        "host_used_bytes": -3 * BLOCK_BYTES,
    }


def tracked_storages() -> list[int]:
    found = [torch_lms.stats().tracked_storages]
    tensors = [block() for _ in range(3)]
    found.append(torch_lms.stats().tracked_storages)
    torch_lms.pageout(tensors)
    found.append(torch_lms.stats().tracked_storages)
    torch_lms.wait()
    return found


@counts_exactly
def test_tracked_storages_grow_with_what_is_known() -> None:
    assert in_fresh_process(tracked_storages) == [0, 0, 3]


@counts_exactly
def test_the_pool_holds_at_least_what_is_used_and_at_most_its_limit(paged: ModuleType) -> None:
    kept = paged_out(4)
    stats = paged.stats()
    assert 4 * BLOCK_BYTES <= stats.host_used_bytes <= stats.host_bytes <= stats.host_limit_bytes
    kept.clear()
    assert paged.stats().host_used_bytes == 0
    assert paged.stats().host_bytes == stats.host_bytes  # kept for the next


def test_allocated_bytes_are_those_of_tensors_within_a_limit() -> None:
    torch_lms.enable({"cpu": "1GiB"})
    before = torch_lms.stats().allocated_bytes
    tensors = [block() for _ in range(3)]
    assert torch_lms.stats().allocated_bytes == before + 3 * (BLOCK_BYTES + HEADER_BYTES)
    del tensors
    assert torch_lms.stats().allocated_bytes == before


def test_the_peak_is_of_the_time_since_the_last_reset() -> None:
    torch_lms.enable({"cpu": "1GiB"})
    torch_lms.stats(reset=True)
    before = torch_lms.stats().allocated_bytes
    tensors = [block() for _ in range(3)]
    del tensors
    peak = before + 3 * (BLOCK_BYTES + HEADER_BYTES)
    assert torch_lms.stats(reset=True).peak_allocated_bytes == peak
    assert torch_lms.stats().peak_allocated_bytes == before


def test_allocations_can_be_counted_without_a_limit() -> None:
    torch_lms.swap.count_cpu_allocations()
    torch_lms.stats(reset=True)
    before = torch_lms.stats()
    tensors = [block() for _ in range(3)]
    after = torch_lms.stats()
    assert after.allocated_bytes - before.allocated_bytes == 3 * (BLOCK_BYTES + HEADER_BYTES)
    assert after.peak_allocated_bytes == after.allocated_bytes
    assert after.limit_bytes == 0
    del tensors
    torch_lms.enable({"cpu": "1GiB"})
    torch_lms.disable()  # the counting allocator goes with the limit


def test_what_there_is_no_memory_for_is_in_no_peak() -> None:
    torch_lms.swap.count_cpu_allocations()
    held = torch_lms.stats(reset=True).allocated_bytes
    with pytest.raises(RuntimeError, match="you tried to allocate"):
        torch.empty(1 << 50)
    assert torch_lms.stats().peak_allocated_bytes < held + (1 << 40)
    assert torch_lms.stats().allocated_bytes < held + (1 << 40)


def test_limit_bytes_are_those_of_automatic_mode() -> None:
    assert torch_lms.stats().limit_bytes == 0
    torch_lms.enable({"cpu": "3GiB"})
    assert torch_lms.stats().limit_bytes == 3 << 30
    torch_lms.disable()
    assert torch_lms.stats().limit_bytes == 0


def test_time_that_ops_wait_for_room_is_counted(paged: ModuleType) -> None:
    torch_lms.enable({"cpu": 8 * BLOCK_BYTES}, min_bytes=4096)
    kept = [block() for _ in range(50)]
    assert paged.stats().wait_us > 0
    assert len(kept) == 50


def test_without_room_the_host_copy_serves(paged: ModuleType) -> None:
    torch_lms.enable({"cpu": 8 * BLOCK_BYTES}, min_bytes=4096)
    one, two = torch.ones(5 * BLOCK_BYTES // 4), torch.ones(5 * BLOCK_BYTES // 4)
    paged.stats(reset=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one.add_(two)
    stats = paged.stats()
    assert stats.host_served > 0
    assert stats.peak_allocated_bytes <= 8 * BLOCK_BYTES
    assert torch.equal(one[:9], torch.full((9,), 2.0))


# --- the object itself ------------------------------------------------------------------------------------------


@counts_exactly
def test_reset_gives_what_was_and_counts_anew(paged: ModuleType) -> None:
    tensors = paged_out(3)
    tensors[0].sum()
    before = dataclasses.asdict(paged.stats(reset=True))
    after = dataclasses.asdict(paged.stats())
    assert before["pageouts"] == 3
    for name, value in after.items():
        if name in GAUGES:
            assert value == before[name], name
        elif name != "peak_allocated_bytes":
            assert value == 0, name


def test_statistics_are_ints_that_do_not_change() -> None:
    stats = torch_lms.stats()
    values = dataclasses.asdict(stats)
    assert all(type(value) is int and value >= 0 for value in values.values())
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.pageouts = 1  # type: ignore[misc]


def test_every_field_is_described() -> None:
    text = SwapStats.__doc__ or ""
    assert [field.name for field in dataclasses.fields(SwapStats) if f"{field.name}: " not in text] == []


# --- spans of the profiler ----------------------------------------------------------------------------------------


def spans_of(act: Callable[[], object]) -> dict[str, int]:
    """How often each span of torch_lms comes up in a profile."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        act()
    return {event.key: event.count for event in profiler.key_averages() if event.key.startswith("torch_lms::")}


@counts_exactly
def test_page_outs_are_spans(paged: ModuleType) -> None:
    tensors = [block() for _ in range(3)]
    spans = spans_of(lambda: (paged.pageout(tensors), paged.wait()))
    assert spans == {"torch_lms::pageout": 3}


@counts_exactly
def test_prefetches_are_spans(paged: ModuleType) -> None:
    tensors = paged_out(3)
    spans = spans_of(lambda: (paged.prefetch(tensors[:2]), paged.wait()))
    assert spans == {"torch_lms::prefetch": 2}


@counts_exactly
def test_passive_page_ins_are_spans(paged: ModuleType) -> None:
    tensors = paged_out(3)
    assert spans_of(lambda: [tensor.sum() for tensor in tensors[:2]]) == {"torch_lms::passive_pagein": 2}


def test_making_room_is_a_span() -> None:
    torch_lms.enable({"cpu": 8 * BLOCK_BYTES}, min_bytes=4096)
    spans = spans_of(lambda: [block() for _ in range(50)])
    assert spans["torch_lms::make_room"] > 0
    assert spans["torch_lms::pageout"] >= 40


# --- warnings --------------------------------------------------------------------------------------------------------


def warnings_of_uses_without_room() -> tuple[list[str], int]:
    torch_lms.enable({"cpu": 8 * BLOCK_BYTES}, min_bytes=4096)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            one, two = torch.ones(5 * BLOCK_BYTES // 4), torch.ones(5 * BLOCK_BYTES // 4)
            one.add_(two)
            del one, two
    return [str(warning.message) for warning in caught], torch_lms.stats().host_served


def test_a_lack_of_room_is_warned_of_once() -> None:
    messages, host_served = in_fresh_process(warnings_of_uses_without_room)
    assert host_served >= 3
    (message,) = messages
    assert "no room on the device for a storage of 655360 bytes" in message
    assert "Raise the limit, or use smaller batches" in message
    assert "torch_lms.stats().host_served" in message


def warnings_of_ordinary_use() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with SwapEnv() as env:
            env.pageout(block())
        torch_lms.enable({"cpu": 8 * BLOCK_BYTES}, min_bytes=4096)
        kept = [block() for _ in range(20)]
        torch_lms.disable()
        del kept
    return [str(warning.message) for warning in caught]


def test_ordinary_use_warns_of_nothing() -> None:
    assert in_fresh_process(warnings_of_ordinary_use) == []
