"""Automatic mode on, on again, with another limit, off, off again."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import torch_lms
from tests.unit.fresh_process import in_fresh_process
from tests.unit.markers import counts_exactly
from tests.unit.trainings import GPT_TRAINING, MIN_BYTES, plain_step, same_bits, train
from torch_lms._core import core
from torch_lms.errors import LimitError
from torch_lms.swap import SwapEnv, is_enabled, state

BLOCK_BYTES = 128 << 10


def block() -> torch.Tensor:
    """As much as one thread fills on its own."""
    return torch.ones(BLOCK_BYTES // 4)


def on(blocks: int) -> None:
    torch_lms.enable({"cpu": blocks * BLOCK_BYTES}, min_bytes=MIN_BYTES)


def all_ones(tensors: list[torch.Tensor]) -> bool:
    return all(torch.equal(tensor, block()) for tensor in tensors)


# --- on ---------------------------------------------------------------------------------------------------


def test_more_than_the_limit_can_be_held_and_used() -> None:
    on(8)
    torch_lms.stats(reset=True)
    held = [block() for _ in range(20)]
    assert all_ones(held)
    stats = torch_lms.stats()
    assert stats.allocated_bytes <= stats.peak_allocated_bytes <= 8 * BLOCK_BYTES
    assert stats.pageouts >= 12


def test_on_twice_is_on() -> None:
    on(8)
    held = [block() for _ in range(10)]
    on(8)
    held += [block() for _ in range(10)]
    assert all_ones(held)
    assert torch_lms.stats().allocated_bytes <= 8 * BLOCK_BYTES
    torch_lms.disable()
    assert not is_enabled()


@pytest.mark.parametrize(("first", "then"), [(8, 12), (12, 8)])
def test_another_limit_takes_the_place_of_the_first(first: int, then: int) -> None:
    on(first)
    held = [block() for _ in range(20)]
    on(then)
    assert torch_lms.stats().limit_bytes == then * BLOCK_BYTES
    held += [block() for _ in range(20)]
    torch_lms.stats(reset=True)
    assert all_ones(held)
    assert (min(first, then) - 2) * BLOCK_BYTES < torch_lms.stats().peak_allocated_bytes <= then * BLOCK_BYTES


def test_another_min_bytes_takes_the_place_of_the_first() -> None:
    torch_lms.enable({"cpu": 8 * BLOCK_BYTES}, min_bytes=2 * BLOCK_BYTES)
    held = [block() for _ in range(6)]
    torch_lms.enable({"cpu": 8 * BLOCK_BYTES}, min_bytes=MIN_BYTES)
    for tensor in held:
        tensor.mul_(1)
    held += [block() for _ in range(10)]
    assert all_ones(held)


@pytest.mark.parametrize(
    "arguments",
    [
        {"limit": "lots"},
        {"limit": {"cpu": 0}},
        {"limit": {"meta": "1GiB"}},
        {"limit": {"cpu": "1GiB"}, "min_bytes": 0},
        {"limit": {"cpu": "1GiB"}, "host_limit": "lots"},
        {"limit": {"cpu": "1GiB"}, "spill_dir": "/not/there"},
    ],
    ids=str,
)
def test_wrong_arguments_while_it_is_on_change_nothing(arguments: dict[str, Any]) -> None:
    on(8)
    with pytest.raises(LimitError):
        torch_lms.enable(**arguments)
    assert is_enabled()
    assert torch_lms.stats().limit_bytes == 8 * BLOCK_BYTES
    assert all_ones([block() for _ in range(20)])


@pytest.mark.skipif(core.has_cuda, reason="this build knows CUDA devices")
def test_another_device_that_is_not_there_changes_nothing() -> None:
    on(8)
    with pytest.raises(LimitError):
        torch_lms.enable({"cuda:0": "1GiB"})
    with pytest.raises(LimitError):
        torch_lms.enable({"cpu": "1GiB", "cuda:0": "1GiB"})
    assert torch_lms.stats().limit_bytes == 8 * BLOCK_BYTES


def test_expandable_segments_are_nothing_to_the_cpu() -> None:
    torch_lms.enable({"cpu": 8 * BLOCK_BYTES}, expandable_segments=False, min_bytes=MIN_BYTES)
    assert all_ones([block() for _ in range(20)])


# --- off ---------------------------------------------------------------------------------------------------


def test_off_brings_everything_back() -> None:
    on(8)
    held = [block() for _ in range(20)]
    torch_lms.disable()
    assert [state(tensor) for tensor in held] == ["resident"] * 20
    stats = torch_lms.stats()
    assert (stats.paged_out_storages, stats.paged_out_bytes, stats.host_used_bytes) == (0, 0, 0)
    assert all_ones(held)


def test_off_removes_the_limit_and_every_hook() -> None:
    on(8)
    assert core.observing_ops()
    torch_lms.disable()
    assert not core.observing_ops()
    assert not is_enabled()
    assert torch_lms.stats().limit_bytes == 0
    before = torch_lms.stats()
    held = [block() for _ in range(20)]
    assert all_ones(held)
    assert torch_lms.stats() == before


def test_off_without_on_has_no_effect() -> None:
    torch_lms.disable()
    torch_lms.disable()
    assert not is_enabled()


@counts_exactly
def test_off_without_on_leaves_what_was_paged_out_by_hand() -> None:
    tensor = block()
    torch_lms.pageout(tensor)
    torch_lms.wait()
    torch_lms.disable()
    assert state(tensor) == "paged_out"
    assert core.observing_ops()


def test_off_in_the_middle_of_an_environment_leaves_that_open() -> None:
    with SwapEnv() as env:
        on(8)
        tensor = block()
        env.pageout(tensor)
        torch_lms.disable()
        assert state(tensor) == "resident"
        env.pageout(tensor)
    assert all_ones([tensor])


def test_off_in_another_thread_than_on() -> None:
    thread = threading.Thread(target=on, args=(8,))
    thread.start()
    thread.join()
    assert is_enabled()
    held = [block() for _ in range(20)]
    thread = threading.Thread(target=torch_lms.disable)
    thread.start()
    thread.join()
    assert not is_enabled()
    assert all_ones(held)


def test_on_and_off_between_steps_is_bit_equal() -> None:
    def steps(switch: bool) -> list[torch.Tensor]:
        count = 0

        def step(*arguments: Any) -> torch.Tensor:
            nonlocal count
            count += 1
            if switch:
                on(64) if count % 2 else torch_lms.disable()
            return plain_step(*arguments)

        return train(GPT_TRAINING, 4, step)

    made = steps(True)
    torch_lms.disable()
    assert same_bits(made, steps(False))


# --- on again ------------------------------------------------------------------------------------------------


@counts_exactly
def test_on_again_brings_what_is_known_within_the_limit_at_once() -> None:
    on(8)
    known = [block() for _ in range(6)]
    torch_lms.disable()
    on(2)
    assert torch_lms.stats().allocated_bytes <= 2 * BLOCK_BYTES
    assert all_ones(known)


def test_on_again_keeps_the_limit_for_what_is_new() -> None:
    for _ in range(3):
        on(8)
        torch_lms.stats(reset=True)
        assert all_ones([block() for _ in range(20)])
        assert torch_lms.stats().peak_allocated_bytes <= 8 * BLOCK_BYTES, torch_lms.memory_summary()
        torch_lms.disable()


@counts_exactly
def test_on_again_pages_out_what_an_earlier_automatic_mode_knew() -> None:
    on(8)
    known = [block() for _ in range(4)]
    torch_lms.disable()
    on(8)
    for tensor in known:
        tensor.mul_(1)
    new = [block() for _ in range(12)]
    torch_lms.wait()
    assert "paged_out" in [state(tensor) for tensor in known]
    assert all_ones(known + new)


@counts_exactly
def test_on_again_with_less_than_is_held_pages_out_what_is_held() -> None:
    on(8)
    held = [block() for _ in range(12)]
    torch_lms.disable()
    on(8)
    assert all_ones(held)


def enable_where_tensors_are_made_elsewhere() -> tuple[bool, bool]:
    torch.set_default_device("meta")  # as it would be "cuda", where pinned memory cannot be
    on(2)
    made = [torch.ones(BLOCK_BYTES // 4, device="cpu") for _ in range(8)]
    return made[0].is_cpu, all(bool(tensor.eq(1).all()) for tensor in made)


def test_a_default_device_of_the_programs_is_none_of_ours() -> None:
    assert in_fresh_process(enable_where_tensors_are_made_elsewhere) == (True, True)
