"""Plans of automatic mode: what is kept, swapped and made again, in programs of many kinds, bit for bit."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

import torch_lms
from tests.unit.fresh_process import in_fresh_process
from tests.unit.markers import counts_exactly
from tests.unit.planned_programs import (
    PROGRAMS,
    ROWS,
    STEPS,
    WIDTH,
    Layer,
    Step,
    batch,
    changing_model,
    digest,
    gradients_of,
    limit_and_results,
    limit_for,
    model_of,
    on,
    optimized,
    plain_training,
    run,
    wait_for_planner,
    with_a_large_head,
)
from tests.unit.trainings import MIN_BYTES, one_thread
from torch_lms._core import core
from torch_lms.swap.planning import last_trace

# Those that repeat the same, if in several parts.
WHOLE_CYCLES = ("training", "large head", "accumulation", "adversarial", "double backward", "inference")


@counts_exactly
@one_thread()
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_planned_program_is_bit_equal_within_its_limit(program: str) -> None:
    begin = PROGRAMS[program]
    share = 0.85 if program == "checkpoint" else 0.6  # that one holds little as it is
    limit_bytes, expected = limit_and_results(begin, share)
    on(limit_bytes)
    for number, (made, same) in enumerate(zip(run(begin), expected, strict=True)):
        assert made == same, f"step {number}"
    assert torch_lms.current_plan() is not None
    assert core.share_in_step() > 0.95 or program not in WHOLE_CYCLES
    measured = torch_lms.current_plan().measured
    late = iter(run(begin))  # on a slow machine the last plan may come with the last step
    while measured is None and program in WHOLE_CYCLES and next(late, None) is not None:
        measured = torch_lms.current_plan().measured
    assert measured is not None or program not in WHOLE_CYCLES
    assert measured is None or (measured.step_us > 0 and 0 < measured.peak_bytes <= limit_bytes)
    assert torch_lms.stats().peak_allocated_bytes <= limit_bytes


@counts_exactly
@one_thread()
def test_an_op_that_is_another_once_costs_no_other_step_its_plan() -> None:
    begin = PROGRAMS["adversarial"]
    hooks: list[RemovableHandle] = []

    def copy_once(_module: nn.Module, _given: object, made: torch.Tensor) -> torch.Tensor:
        hooks.pop().remove()
        return made.clone()

    on(limit_for(begin))
    step, shares, odd_step = begin(), list[float](), 0
    for number in range(3 * STEPS):  # on a slow machine the last plan may come late
        if odd_step == 0 and min(shares[-4:], default=0) > 0.95:
            odd_step = number
            hooks.append(nn.modules.module.register_module_forward_hook(copy_once))
        step(number)
        wait_for_planner()
        shares.append(core.share_in_step())
        if odd_step != 0 and number == odd_step + 4:
            break
    assert odd_step != 0
    assert min(shares[odd_step:]) > 0.95


@pytest.fixture
def loading_thread() -> Iterator[None]:
    """Runs ops beside the program, as what loads data does."""
    ended = threading.Event()

    def load() -> None:
        while not ended.wait(0.01):
            torch.zeros(MIN_BYTES).add_(1)

    thread = threading.Thread(target=load)
    thread.start()
    yield
    ended.set()
    thread.join()


def check_follows_plan(begin: Callable[[], Step], limit_bytes: int) -> None:
    expected = list(run(begin))
    on(limit_bytes)
    shares = set()
    for number, (made, same) in enumerate(zip(run(begin), expected, strict=True)):
        assert made == same, f"step {number}"
        shares.add(core.share_in_step())
    assert torch_lms.current_plan() is not None
    # Not always: autograd adds out of place what a thread of the core happens to hold.
    assert 1 in shares


@counts_exactly
@one_thread()
@pytest.mark.parametrize("program", ["training", "double backward"])
@pytest.mark.usefixtures("loading_thread")
def test_what_other_threads_run_is_no_part_of_a_plan(program: str) -> None:
    check_follows_plan(PROGRAMS[program], limit_for(PROGRAMS[program], 0.7))


@counts_exactly
@one_thread()
def test_other_threads_may_use_what_a_plan_moves() -> None:
    ended = threading.Event()

    def watched() -> Step:
        model = model_of()
        optimizer = optimized(model)

        def watch() -> None:
            while not ended.wait(0.01):
                for parameter in model.parameters():
                    parameter.detach().sum()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        threads.append(thread)

        def step(number: int) -> list[torch.Tensor]:
            optimizer.zero_grad()
            loss = model(batch(number)).square().mean()
            loss.backward()
            made = [loss.detach().clone(), *gradients_of(model)]
            optimizer.step()
            return made

        return step

    threads: list[threading.Thread] = []
    try:
        check_follows_plan(watched, limit_for(watched, 0.7))
    finally:
        ended.set()
        for thread in threads:
            thread.join()


@counts_exactly
@one_thread()
def test_a_program_on_another_thread_is_planned() -> None:
    failed: list[BaseException] = []

    def train() -> None:
        try:
            check_follows_plan(plain_training, limit_for(plain_training))
        except BaseException as error:  # the main thread's to raise
            failed.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert failed == []


@counts_exactly
@one_thread()
def test_a_plan_is_made_again_with_the_times_of_a_step_that_follows_one() -> None:
    on(limit_for(plain_training))
    step, expected = plain_training(), plain_training()
    first_us, number, began_s = 0.0, 0, time.monotonic()
    while not core.follows_timed_plan():
        assert time.monotonic() - began_s < 150
        assert digest(step(number)) == digest(expected(number)), f"step {number}"
        wait_for_planner()
        plan, number = torch_lms.current_plan(), number + 1
        first_us = first_us or (plan.predicted.plain_us if plan is not None else 0.0)
    plan, trace = torch_lms.current_plan(), last_trace()
    assert plan is not None
    assert trace is not None
    assert plan.predicted.plain_us == pytest.approx(sum(op.duration_us for op in trace.ops))
    assert plan.predicted.plain_us != pytest.approx(first_us)
    for later in range(number, number + 10):  # and that is all
        step(later)
    last = torch_lms.current_plan()
    assert last is not None
    assert replace(last, measured=None) == replace(plan, measured=None)


@counts_exactly
@one_thread()
def test_what_a_plan_holds_is_in_use_until_its_op_begins() -> None:
    in_use = []
    hook = nn.modules.module.register_module_forward_pre_hook(
        lambda module, _: in_use.append(torch_lms.stats().allocated_bytes) if isinstance(module, Layer) else None
    )
    try:
        on(limit_for(with_a_large_head))
        for _ in run(with_a_large_head):
            pass
    finally:
        hook.remove()
    plan = torch_lms.current_plan()
    assert plan is not None
    assert torch_lms.stats().host_served == 0
    held_bytes = sum(one.bytes for one in plan.placeholders)
    assert held_bytes >= 4 * ROWS * 32 * WIDTH  # the head's output
    assert max(in_use[-8:]) >= held_bytes  # before the layers, in the last step: one is lent now and then


@counts_exactly
@one_thread()
def test_what_a_layer_norm_reads_can_be_made_again() -> None:
    on(limit_for(plain_training))
    for _ in run(plain_training):
        pass
    trace = last_trace()
    assert trace is not None
    read = {number for op in trace.ops if op.name == "aten::native_layer_norm" for number in op.inputs}
    made = [trace.storages[number] for number in read if trace.storages[number].producer is not None]
    assert [one for one in made if one.writes] == []
    assert any(one.recompute is not None for one in made)  # what is random cannot be


@counts_exactly
@one_thread()
@pytest.mark.parametrize("allowed", ["swap", "recompute"])
def test_each_way_works_alone(allowed: str) -> None:
    limit_bytes, expected = limit_and_results(plain_training, 0.7)
    on(limit_bytes, **{"swap": allowed == "swap", "recompute": allowed == "recompute"})
    counted = []
    for made, same in zip(run(plain_training), expected, strict=True):
        assert made == same
        stats = torch_lms.stats(reset=True)
        counted.append((stats.pageout_bytes, stats.recomputed_bytes))
    copied_bytes, recomputed_bytes = counted[-1]
    assert (copied_bytes > 0) == (allowed == "swap")
    assert (recomputed_bytes > 0) == (allowed == "recompute")
    assert core.share_in_step() > 0.95


@counts_exactly
@one_thread()
def test_a_program_that_becomes_another_is_planned_anew() -> None:
    on(limit_for(changing_model))
    signatures = set()
    for _ in run(changing_model):
        if (plan := torch_lms.current_plan()) is not None:
            signatures.add(plan.signature)
    assert len(signatures) > 1


@counts_exactly
@one_thread()
def test_a_plan_ends_with_automatic_mode() -> None:
    on(limit_for(plain_training))
    for _ in run(plain_training):
        pass
    assert torch_lms.current_plan() is not None
    torch_lms.disable()
    assert torch_lms.current_plan() is None
    assert torch_lms.stats().paged_out_storages == 0


def read_in_a_child() -> bool:
    """What a forked child finds in storages of which a plan has dropped some."""
    step = plain_training()
    on(limit_for(plain_training, 0.7), swap=False)
    for number in range(STEPS // 2):
        step(number)
        wait_for_planner()
    model = model_of()
    model(batch(0)).square().mean()
    x = batch(1)
    for layer in model:
        x = layer(x)
    expected = float(x.sum())
    child = os.fork()
    if child == 0:
        os._exit(0 if float(x.sum()) == expected else 1)
    return os.waitpid(child, 0)[1] == 0


@counts_exactly
def test_a_forked_child_reads_everything() -> None:
    assert in_fresh_process(read_in_a_child)
