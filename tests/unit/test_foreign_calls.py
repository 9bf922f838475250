"""A function of another extension takes addresses, then allocates and runs ops, then goes through the addresses.

Within a limit that is full, what it allocates would push out the tensors whose addresses it has. It does not: the limit
gives way until the function returns (csrc/extension/base/ForeignCall.h).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

import torch_lms
from tests.unit.foreign_code import TO_READ, TO_WRITE, load, needs_compiler
from tests.unit.fresh_process import run_python
from tests.unit.markers import counts_exactly
from torch_lms._core import core

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), needs_compiler]  # the extension is compiled once

MIB = 1 << 20
NUMEL = MIB // 4
LIMIT_BYTES = 16 * MIB
BLOCKS = 10  # twice as many tensors of 1 MiB are made between taking an address and using it

with_and_without_gil = pytest.mark.parametrize("gil", ["", "_without_gil"])


def function(name: str, gil: str) -> Callable[..., Any]:
    return getattr(load(), name + gil)  # type: ignore[no-any-return]


@pytest.fixture
def others() -> Iterator[list[torch.Tensor]]:
    """Automatic mode, with tensors that fill the limit; they keep their bytes, and the limit holds afterwards."""
    torch_lms.enable({"cpu": LIMIT_BYTES}, min_bytes="64KiB")
    tensors = [torch.full((NUMEL,), float(number)) for number in range(20)]
    torch_lms.stats(reset=True)
    yield tensors
    assert [tensor.sum().item() for tensor in tensors] == [float(number * NUMEL) for number in range(20)]
    made = torch.ones(NUMEL)
    assert torch_lms.stats().allocated_bytes <= LIMIT_BYTES
    torch_lms.stats(reset=True)
    assert [(tensor + made).sum().item() for tensor in tensors] == [float((number + 1) * NUMEL) for number in range(20)]
    assert torch_lms.stats().peak_allocated_bytes <= LIMIT_BYTES
    assert torch_lms.stats().limit_exceeded == 0


def used(value: float) -> torch.Tensor:
    return torch.full((NUMEL,), value)


def fill_up(others: list[torch.Tensor]) -> None:
    for tensor in others:
        tensor.add_(0)


def out(value: float) -> torch.Tensor:
    tensor = torch.full((NUMEL,), value)
    torch_lms.pageout(tensor)
    torch_lms.wait()
    return tensor


def going(value: float) -> torch.Tensor:
    tensor = torch.full((NUMEL,), value)
    torch_lms.pageout(tensor)
    return tensor


def back(value: float) -> torch.Tensor:
    """Of which the host has a copy."""
    tensor = out(value)
    tensor.sum()
    return tensor


STATES: dict[str, Callable[[float], torch.Tensor]] = {"used": used, "out": out, "going": going, "back": back}


@with_and_without_gil
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("way", TO_READ)
def test_what_is_read_through_an_address_is_right(way: str, state: str, gil: str, others: list[torch.Tensor]) -> None:
    fill_up(others)
    tensor = STATES[state](3.0)
    assert function("read", gil)(way, tensor, BLOCKS) == 3.0 * NUMEL
    assert tensor.sum().item() == 3.0 * NUMEL


@with_and_without_gil
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("way", TO_WRITE)
def test_what_is_written_through_an_address_is_there(
    way: str, state: str, gil: str, others: list[torch.Tensor]
) -> None:
    fill_up(others)
    tensor = STATES[state](3.0)
    function("write", gil)(way, tensor, 5.0, BLOCKS)
    assert tensor.sum().item() == 5.0 * NUMEL
    fill_up(others)  # it goes out
    assert tensor.sum().item() == 5.0 * NUMEL


@with_and_without_gil
@pytest.mark.parametrize("state", STATES)
def test_ops_inside_leave_an_address_valid(state: str, gil: str, others: list[torch.Tensor]) -> None:
    if state == "out" and not core.has_materializer:
        pytest.skip("nothing tells of the address of a host copy, and the op pages in: it needs torch 2.13")
    fill_up(others)
    tensor = STATES[state](3.0)
    assert function("write_beside_ops", gil)(tensor, BLOCKS) == (1.0 * NUMEL, 2.0 * NUMEL)
    fill_up(others)
    assert tensor.sum().item() == 3.0 * NUMEL


@with_and_without_gil
@pytest.mark.parametrize("states", [(one, other) for one in STATES for other in STATES], ids="-".join)
def test_two_addresses_are_valid_together(states: tuple[str, str], gil: str, others: list[torch.Tensor]) -> None:
    fill_up(others)
    source, target = (STATES[state](value) for state, value in zip(states, (3.0, 4.0), strict=True))
    function("add", gil)(source, target, BLOCKS)
    fill_up(others)
    assert (source.sum().item(), target.sum().item()) == (3.0 * NUMEL, 7.0 * NUMEL)


@with_and_without_gil
def test_a_function_with_a_backward_goes_through_addresses(gil: str, others: list[torch.Tensor]) -> None:
    leaf = torch.ones(NUMEL, requires_grad=True)
    fill_up(others)
    result = function("doubled", gil)(leaf * 3, BLOCKS)
    assert result.sum().item() == 6.0 * NUMEL
    fill_up(others)
    (result * 2).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.sum().item() == 12.0 * NUMEL


def test_a_kernel_of_another_library_pages(others: list[torch.Tensor], chaos: bool) -> None:
    load()
    before = torch_lms.stats().limit_exceeded
    fill_up(others)
    for number in range(5):
        torch.ops.torch_lms_foreign.fill(others[number], 7.0)
        assert others[number].sum().item() == 7.0 * NUMEL
        others[number].fill_(number)
    assert torch_lms.stats().limit_exceeded == before  # its op has pinned what it was given
    assert torch_lms.stats().peak_allocated_bytes <= LIMIT_BYTES


@counts_exactly
@with_and_without_gil
def test_allocations_beyond_the_limit_are_counted(gil: str, others: list[torch.Tensor]) -> None:
    fill_up(others)
    tensor = used(3.0)
    assert torch_lms.stats().limit_exceeded == 0
    assert function("read", gil)("const_data_ptr", tensor, BLOCKS) == 3.0 * NUMEL
    stats = torch_lms.stats()
    assert 0 < stats.limit_exceeded <= 2 * BLOCKS
    assert LIMIT_BYTES < stats.peak_allocated_bytes <= LIMIT_BYTES + (2 * BLOCKS + 1) * MIB


@counts_exactly
def test_a_function_that_finds_room_exceeds_nothing(paged: ModuleType) -> None:
    paged.enable({"cpu": 3 * BLOCKS * MIB}, min_bytes="64KiB")
    tensor = used(3.0)
    assert function("read", "")("const_data_ptr", tensor, BLOCKS) == 3.0 * NUMEL
    assert paged.stats().limit_exceeded == 0


PROGRAM = """
import torch, torch_lms
from tests.unit.foreign_code import load
extension = load()
torch_lms.enable({"cpu": "16MiB"}, min_bytes="64KiB")
others = [torch.ones(1 << 18) for _ in range(20)]
for _ in range(3):
    for way in extension.to_read:
        assert extension.read(way, others[-1], 10) == 1 << 18
assert torch_lms.stats().limit_exceeded > 3
"""


def test_the_limit_gives_way_with_one_warning() -> None:
    load()
    done = run_python("-c", PROGRAM)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the limit gives way until it returns") == 1
    assert "torch_lms.stats().limit_exceeded" in done.stderr
