"""Automatic mode after paging was used before: what is known already counts, and can go out."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

import torch_lms
from tests.unit.fresh_process import in_fresh_process
from tests.unit.test_attention import OPS_IN_CYCLE
from torch_lms._core import core

LIMIT_BYTES = 64 << 10


def eight_tenths(first: int) -> list[torch.Tensor]:
    """Of the limit."""
    return [torch.arange(2500.0) + first + i for i in range(5)]


@pytest.mark.parametrize("used_again", [False, True])
def test_storages_of_an_earlier_automatic_mode_can_go_out(used_again: bool, paged: ModuleType) -> None:
    paged.enable(limit=LIMIT_BYTES, min_bytes=512)
    early = eight_tenths(0)
    paged.disable()
    paged.enable(limit=LIMIT_BYTES, min_bytes=512)
    paged.stats(reset=True)
    if used_again:
        early = [tensor.add_(0) for tensor in early]
    late = eight_tenths(100)
    for i in range(5):
        assert torch.equal(early[i], torch.arange(2500.0) + i)
        assert torch.equal(late[i], torch.arange(2500.0) + 100 + i)
    assert paged.stats().peak_allocated_bytes <= LIMIT_BYTES


def test_lower_limit_while_on_makes_room_from_what_is_there(paged: ModuleType, chaos: bool) -> None:
    if chaos:
        pytest.skip("chaos knew storages before")
    paged.enable(limit=4 * LIMIT_BYTES, min_bytes=512)
    early = eight_tenths(0)
    paged.enable(limit=LIMIT_BYTES, min_bytes=512)
    late = eight_tenths(100)
    for i in range(5):
        assert torch.equal(early[i], torch.arange(2500.0) + i)
        assert torch.equal(late[i], torch.arange(2500.0) + 100 + i)
    assert paged.stats().allocated_bytes <= LIMIT_BYTES


def test_an_interrupted_disable_can_be_called_again(paged: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    paged.enable(limit=LIMIT_BYTES, min_bytes=512)
    with monkeypatch.context() as patched:
        patched.setattr("torch_lms.swap.planning.end", interrupted)
        with pytest.raises(KeyboardInterrupt):
            paged.disable()
    paged.disable()
    assert paged.stats().limit_bytes == 0
    torch.ones(4 * LIMIT_BYTES)  # there is no limit any more


def test_an_interrupted_enable_can_be_ended(paged: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("torch_lms.swap.optimizers.install", interrupted)
        with pytest.raises(KeyboardInterrupt):
            paged.enable(limit=LIMIT_BYTES, min_bytes=512)
    paged.disable()
    assert paged.stats().limit_bytes == 0
    torch.ones(4 * LIMIT_BYTES)


def layers_around_numpy() -> int:
    module = sys.modules.pop("torch._inductor.output_code", None)
    sys.modules["torch._inductor.output_code"] = None  # type: ignore[assignment]
    for _ in range(3):
        with pytest.raises(ImportError):
            torch_lms.pageout(torch.ones(4096))
    del sys.modules["torch._inductor.output_code"]
    if module is not None:
        sys.modules["torch._inductor.output_code"] = module
    torch_lms.pageout(torch.ones(4096))
    method, layers = torch.Tensor.numpy, 0
    while hasattr(method, "__wrapped__"):
        method, layers = method.__wrapped__, layers + 1
    return layers


def test_watching_that_fails_to_begin_begins_once(chaos: bool) -> None:
    if chaos:
        pytest.skip("chaos watches from the import on")
    assert in_fresh_process(layers_around_numpy) == 1


def sums_within_less_than_was_held(asleep: bool) -> list[float]:
    """Tensors that nobody has seen being made take more than a limit; how they are used within it."""
    torch_lms.swap.count_cpu_allocations()  # as the allocator of a GPU does, whatever is on
    if asleep:
        torch_lms.enable({"cpu": 64 * LIMIT_BYTES}, min_bytes=512)
        tensor = torch.zeros(512)
        for _ in range(2 * OPS_IN_CYCLE + 4):
            tensor.add_(1)
        assert core.attention() == "asleep"
    held = [torch.full((1024,), float(number)) for number in range(64)]  # four times the limit
    torch_lms.enable({"cpu": LIMIT_BYTES}, min_bytes=512)
    found = [float((one + 1).sum()) for one in held]
    assert torch_lms.stats().limit_exceeded == 0
    assert torch_lms.stats().allocated_bytes <= LIMIT_BYTES
    return found


@pytest.mark.parametrize("asleep", [False, True])
def test_a_limit_of_less_than_is_held_already_lets_it_go_out(asleep: bool, chaos: bool) -> None:
    if chaos:
        pytest.skip("chaos knew storages before, and nothing sleeps")
    found = in_fresh_process(sums_within_less_than_was_held, asleep)
    assert found == [1024.0 * (number + 1) for number in range(64)]


def an_array_of_before() -> tuple[bool, int]:
    """Whether an array has what ops write to its tensor, which nobody has watched being asked for its address."""
    early = torch.arange(250_000.0)
    array = early.numpy()
    torch_lms.enable(2 << 20, min_bytes=4096)
    later = [torch.arange(250_000.0) + i for i in range(6)]
    early.mul_(2)
    later = [one + 1 for one in later]
    return bool(array[3] == 6) and later[5][0].item() == 6, torch_lms.stats().pageouts


def test_what_was_made_before_memory_was_counted_stays_where_it_is() -> None:
    right, pageouts = in_fresh_process(an_array_of_before)
    assert right
    assert pageouts > 0
