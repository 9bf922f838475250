"""Ops whose inputs and outputs fill the device: what they have needed once is known, and they are not run twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F  # noqa: N812  # PyTorch's own name for it

import torch_lms
from tests.unit.fresh_process import in_fresh_process
from tests.unit.markers import counts_exactly
from tests.unit.planned_programs import wait_for_planner
from tests.unit.trainings import MIN_BYTES, one_thread
from torch_lms.swap.planning import last_trace

ROWS, WIDTH, CLASSES = 512, 32, 8192
LOGITS_BYTES = 4 * ROWS * CLASSES
FITS = 3.6  # logits: the loss's backward reads two and makes one, and a guess says four
STEPS = 12


@one_thread()
def served_and_exceeded() -> tuple[list[int], list[int]]:
    """In each step of a classifier, whose results are those without a limit."""
    torch.manual_seed(0)
    x, weight = torch.randn(ROWS, WIDTH), torch.randn(WIDTH, CLASSES, requires_grad=True)
    labels = torch.arange(ROWS) % CLASSES

    def step() -> list[torch.Tensor]:
        weight.grad = None
        loss = F.cross_entropy(x.sin() @ weight, labels)
        loss.backward()
        assert weight.grad is not None
        return [loss.detach(), weight.grad.clone()]

    expected = step()
    torch_lms.swap.count_cpu_allocations()
    torch_lms.enable(int(FITS * LOGITS_BYTES) + torch_lms.stats().allocated_bytes, min_bytes=MIN_BYTES)
    served, exceeded = [], []
    for _ in range(STEPS):
        torch_lms.stats(reset=True)
        assert all(map(torch.equal, step(), expected))
        served.append(torch_lms.stats().host_served)
        exceeded.append(torch_lms.stats().limit_exceeded)
        wait_for_planner()
    assert last_trace() is not None
    return served, exceeded


@counts_exactly
def test_what_an_op_needs_is_known_once_it_has_run() -> None:
    served, exceeded = in_fresh_process(served_and_exceeded)
    assert served[0] > 0
    assert set(served[1:]) == {0}
    assert set(exceeded) == {0}  # also in the step that is recorded, whose ops are run again


LARGE_BYTES = 3 << 20


def served_by(op: Callable[[], torch.Tensor]) -> int:
    """Inputs that an op has read from the host."""
    torch_lms.stats(reset=True)
    op()
    return torch_lms.stats().host_served


def enable_above(more_bytes: int) -> None:
    torch_lms.swap.count_cpu_allocations()
    torch_lms.enable(more_bytes + torch_lms.stats().allocated_bytes, min_bytes=MIN_BYTES)


def freed_in_the_op() -> None:
    @torch.library.custom_op("torch_lms_tests::several_copies", mutates_args=())
    def several_copies(x: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            x.clone()  # freed before the next one
        return x[:1].clone()

    enable_above(4 * LARGE_BYTES)  # five copies at once would not fit
    x, other = torch.ones(LARGE_BYTES // 4), torch.ones(LARGE_BYTES // 4)
    torch.cat([x, other])  # so that memory gets short
    assert [served_by(lambda: several_copies(x)) for _ in range(4)][1:] == [0, 0, 0]  # the first by a guess


@counts_exactly
def test_what_an_op_frees_before_it_allocates_again_needs_no_room_of_its_own() -> None:
    in_fresh_process(freed_in_the_op)


def refused_outside_of_ops() -> None:
    one, other = torch.ones(LARGE_BYTES // 4), torch.ones(LARGE_BYTES // 4)
    enable_above(5 * LARGE_BYTES)
    assert served_by(lambda: one + other) == 0
    with pytest.raises(RuntimeError):
        torch.ones(4).untyped_storage().resize_(1000 * LARGE_BYTES)
    assert [served_by(lambda: one + other) for _ in range(3)] == [0, 0, 0]


def refused_within_a_lower_limit() -> None:
    enable_above(3 * LARGE_BYTES)
    part = torch.ones(LARGE_BYTES // 4)
    with pytest.raises(torch.OutOfMemoryError):
        torch.cat([part] * 4)
    torch_lms.disable()
    assert served_by(lambda: torch.cat([part] * 2)) == 0
    enable_above(7 * LARGE_BYTES)
    assert [served_by(lambda: torch.cat([part] * 4)) for _ in range(3)][1:] == [0, 0]  # the first by a guess


@pytest.mark.parametrize(
    "program", [refused_outside_of_ops, refused_within_a_lower_limit], ids=lambda one: one.__name__
)
@counts_exactly
def test_what_was_refused_once_says_nothing_of(program: Callable[[], None]) -> None:
    in_fresh_process(program)
