"""Whose time is whose: nodes that take known numbers of ticks, on a clock that only they move."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from torch_lms.profile.storages import tensors_in
from torch_lms.profile.timing import RunTimer


class Ticks:
    """A clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 0
        self.waits = 0

    def mark(self) -> int:
        return self.now

    def lead(self) -> None:
        pass

    def elapsed_us(self, start: int, end: int) -> float:
        return float(end - start)

    def wait(self) -> None:
        self.waits += 1


class _Work(torch.autograd.Function):
    """Takes ticks, forward and backward; gives its input's values on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: Ticks, forward: int, backward: int) -> torch.Tensor:
        ctx.clock, ctx.backward_ticks = clock, backward
        clock.now += forward
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        ctx.clock.now += ctx.backward_ticks
        return gradient, None, None, None


@pytest.fixture
def clock() -> Ticks:
    return Ticks()


@pytest.fixture
def timer(clock: Ticks) -> RunTimer:
    return RunTimer(clock)


def run_backward(timer: RunTimer, output: torch.Tensor) -> None:
    timer.backward(lambda: output.sum().backward())


def test_each_node_gets_its_own_ticks(clock: Ticks, timer: RunTimer) -> None:
    x = torch.ones(2, requires_grad=True)
    a = timer.watch("a", lambda: _Work.apply(x, clock, 3, 5))
    clock.now += 1000  # between nodes: no node's time
    b = timer.watch("b", lambda: _Work.apply(a, clock, 7, 11))
    run_backward(timer, b)
    timer.finish_runs(keep=True)
    assert dict(timer.times()[0].device_us) == {"a": 3, "b": 7}
    assert dict(timer.times()[1].device_us) == {"a": 5, "b": 11}


def test_branches_that_meet_again_stay_apart(clock: Ticks, timer: RunTimer) -> None:
    x = torch.ones(2, requires_grad=True)
    stem = timer.watch("stem", lambda: _Work.apply(x, clock, 1, 2))
    left = timer.watch("left", lambda: _Work.apply(stem, clock, 10, 20))
    right = timer.watch("right", lambda: _Work.apply(stem, clock, 100, 200))
    run_backward(timer, timer.watch("sum", lambda: left + right))
    timer.finish_runs(keep=True)
    assert dict(timer.times()[0].device_us) == {"stem": 1, "left": 10, "right": 100, "sum": 0}
    assert dict(timer.times()[1].device_us) == {"stem": 2, "left": 20, "right": 200, "sum": 0}


def test_a_node_of_several_functions_gets_all_of_them(clock: Ticks, timer: RunTimer) -> None:
    x = torch.ones(2, requires_grad=True)
    a = timer.watch("a", lambda: _Work.apply(_Work.apply(_Work.apply(x, clock, 1, 1), clock, 2, 2), clock, 4, 4))
    b = timer.watch("b", lambda: _Work.apply(a, clock, 0, 8))
    run_backward(timer, b)
    timer.finish_runs(keep=True)
    assert dict(timer.times()[1].device_us) == {"a": 7, "b": 8}


def test_a_node_that_gives_its_input_on_takes_no_time_from_its_maker(clock: Ticks, timer: RunTimer) -> None:
    x = torch.ones(2, requires_grad=True)
    made = timer.watch("made", lambda: _Work.apply(x, clock, 1, 6))
    same = timer.watch("same", lambda: made.contiguous())
    run_backward(timer, timer.watch("after", lambda: _Work.apply(same, clock, 1, 7)))
    timer.finish_runs(keep=True)
    assert timer.times()[1].device_us["made"] == 6
    assert timer.times()[1].device_us["after"] == 7
    assert "same" not in timer.times()[1].device_us


def test_a_node_with_several_outputs_begins_with_the_first_that_is_ready(clock: Ticks, timer: RunTimer) -> None:
    x = torch.ones(4, requires_grad=True)
    made = timer.watch("made", lambda: _Work.apply(x, clock, 0, 5))
    left, right = timer.watch("split", lambda: made.split(2))
    left = timer.watch("left", lambda: _Work.apply(left, clock, 0, 2))
    right = timer.watch("right", lambda: _Work.apply(right, clock, 0, 3))
    run_backward(timer, timer.watch("sum", lambda: left * right))
    timer.finish_runs(keep=True)
    assert {name: us for name, us in timer.times()[1].device_us.items() if us} == {"made": 5, "left": 2, "right": 3}


def test_warm_up_is_left_out_and_of_the_other_runs_it_is_the_median(clock: Ticks, timer: RunTimer) -> None:
    x = torch.ones(2, requires_grad=True)
    for keep, forward, backward in ((False, 9, 9), (True, 3, 400), (True, 900, 4), (True, 2, 5)):
        run_backward(timer, timer.watch("a", partial(_Work.apply, x, clock, forward, backward)))
        timer.finish_runs(keep)
    assert dict(timer.times()[0].device_us) == {"a": 3}
    assert dict(timer.times()[1].device_us) == {"a": 5}
    assert clock.waits == 4


def test_runs_may_be_finished_together(clock: Ticks, timer: RunTimer) -> None:
    """A node that a run has twice takes the time of both; a run that has not a node says nothing of it."""
    for names in ("aab", "ab", "a"):
        if names != "aab":
            timer.next_run()
        for name in names:
            timer.watch(name, partial(_Work.apply, torch.ones(2), clock, 7, 1))
    timer.finish_runs(keep=True)
    assert dict(timer.times()[0].device_us) == {"a": 7, "b": 7}
    assert clock.waits == 1


def test_nothing_of_a_run_is_held_after_it(clock: Ticks, timer: RunTimer) -> None:
    import gc
    import weakref

    x = torch.ones(2, requires_grad=True)
    output = timer.watch("a", lambda: _Work.apply(x, clock, 1, 1))
    gone = weakref.ref(output)
    run_backward(timer, output)
    timer.finish_runs(keep=True)
    del output
    gc.collect()
    assert gone() is None


def test_tensors_are_found_wherever_they_are() -> None:
    tensors = [torch.full((1,), float(index)) for index in range(4)]
    value = {"a": tensors[0], "b": [tensors[1], (tensors[2], None, 3)], "c": {"d": tensors[3]}}
    assert [tensor.item() for tensor in tensors_in(value)] == [0, 1, 2, 3]
