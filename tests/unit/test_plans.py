"""Plans of automatic mode: what is kept, swapped and made again, in programs of many kinds, bit for bit."""

from __future__ import annotations

import gc
import hashlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F  # noqa: N812  # PyTorch's own name for it
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

import torch_lms
from tests.unit.fresh_process import in_fresh_process
from tests.unit.markers import counts_exactly
from tests.unit.trainings import MIN_BYTES, one_thread
from torch_lms._core import core
from torch_lms.errors import PlanError
from torch_lms.swap import planning
from torch_lms.swap.planning import last_trace

Step = Callable[[int], list[torch.Tensor]]

WIDTH, ROWS = 64, 256
STEPS = 15


class Layer(nn.Module):
    def __init__(self, *, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.before = nn.BatchNorm1d(WIDTH) if norm else nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.before(x)))))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, x * x)
        return x * x * x

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
        _, square = ctx.saved_tensors
        return 3 * square * grad


def model_of(layers: int = 6, **options: object) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(**options) for _ in range(layers)))


def batch(step: int, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(step))


def optimized(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def plain_training(**options: object) -> Step:
    model = model_of(**options)
    optimizer = optimized(model)

    def step(number: int) -> list[torch.Tensor]:
        torch.manual_seed(number)
        optimizer.zero_grad()
        loss = model(batch(number)).square().mean()
        loss.backward()
        made = [loss.detach().clone(), *gradients_of(model), *(buffer.clone() for buffer in model.buffers())]
        optimizer.step()
        return made

    return step


def accumulating() -> Step:
    model = model_of()
    optimizer = optimized(model)

    def step(number: int) -> list[torch.Tensor]:
        optimizer.zero_grad()
        for part in range(3):
            model(batch(3 * number + part)).square().mean().backward()
        optimizer.step()
        return gradients_of(model)

    return step


def evaluating_between() -> Step:
    train = plain_training()
    model = model_of(3)

    def step(number: int) -> list[torch.Tensor]:
        made = train(number)
        if number % 3 == 2:
            with torch.no_grad():
                made.append(model(batch(number)).clone())
        return made

    return step


def with_a_large_head() -> Step:
    model = nn.Sequential(*model_of(8), nn.Linear(WIDTH, 32 * WIDTH))
    optimizer = optimized(model)

    def step(number: int) -> list[torch.Tensor]:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch(number)), torch.full((ROWS,), number))
        loss.backward()
        made = [loss.detach().clone(), *gradients_of(model)]
        optimizer.step()
        return made

    return step


def adversarial() -> Step:
    maker, judge = model_of(4), model_of(4)
    optimizers = optimized(maker), optimized(judge)

    def step(number: int) -> list[torch.Tensor]:
        made = []
        for optimizer, which in zip(optimizers, (maker, judge), strict=True):
            optimizer.zero_grad()
            loss = judge(maker(batch(number))).square().mean() * (1 if which is maker else -1)
            loss.backward()
            optimizer.step()
            made += [loss.detach().clone(), *gradients_of(which)]
        return made

    return step


def changing_shapes() -> Step:
    model = model_of()

    def step(number: int) -> list[torch.Tensor]:
        model.zero_grad()
        model(batch(number, ROWS if number % 2 else ROWS // 2)).square().mean().backward()
        return gradients_of(model)

    return step


def changing_model() -> Step:
    layers = list(model_of(8))

    def step(number: int) -> list[torch.Tensor]:
        model = nn.Sequential(*layers[: 8 if number < STEPS // 2 else 5])
        model.zero_grad()
        model(batch(number)).square().mean().backward()
        return gradients_of(model)

    return step


def inferring() -> Step:
    model = model_of(12)

    def step(number: int) -> list[torch.Tensor]:
        with torch.no_grad():
            return [model(batch(number, ROWS // 8)).softmax(-1) for _ in range(10)]

    return step


def of_kind(forward: Callable[[nn.Sequential, torch.Tensor], torch.Tensor], **options: object) -> Callable[[], Step]:
    def begin() -> Step:
        model = model_of(**options)

        def step(number: int) -> list[torch.Tensor]:
            model.zero_grad()
            forward(model, batch(number)).square().mean().backward()
            return gradients_of(model)

        return step

    return begin


def cast(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(x).float()


def checkpointed(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    for layer in model:
        x = checkpoint(layer, x, use_reentrant=False)
    return x


def cubed(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    for layer in model:
        x = Cube.apply(layer(x)) * 0.1
    return x


def hooked(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    with saved_tensors_hooks(lambda saved: (saved,), lambda packed: packed[0]):
        return model(x)


def in_place(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    for layer in model:
        x = layer(x).mul_(0.5)
    return x


def twice_differentiated(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return gradient


def interrupted() -> Step:
    """A forward that fails at another op each time."""
    model = model_of()
    countdown = [0]

    def count(module: nn.Module, _arguments: object) -> None:
        countdown[0] -= 1
        if countdown[0] == 0:
            raise RuntimeError("as asked")

    for layer in model:
        layer.register_forward_pre_hook(count)

    def step(number: int) -> list[torch.Tensor]:
        model.zero_grad()
        countdown[0] = number % 6 + 1 if number % 2 else 0
        try:
            model(batch(number)).square().mean().backward()
        except RuntimeError as error:
            assert str(error) == "as asked"  # noqa: PT017
        countdown[0] = 0
        model(batch(number)).square().mean().backward()
        return gradients_of(model)

    return step


PROGRAMS: dict[str, Callable[[], Step]] = {
    "training": plain_training,
    "large head": with_a_large_head,
    "dropout": lambda: plain_training(dropout=0.2),
    "batch norm": lambda: plain_training(norm=True),
    "accumulation": accumulating,
    "evaluation between": evaluating_between,
    "adversarial": adversarial,
    "changing shapes": changing_shapes,
    "inference": inferring,
    "changing model": changing_model,
    "autocast": of_kind(cast),
    "checkpoint": of_kind(checkpointed),
    "custom function": of_kind(cubed),
    "saved tensor hooks": of_kind(hooked),
    "in place": of_kind(in_place),
    "double backward": of_kind(twice_differentiated),
    "exceptions": interrupted,
}


# Those that repeat the same, if in several parts.
WHOLE_CYCLES = ("training", "large head", "accumulation", "adversarial", "double backward", "inference")


def wait_for_planner() -> None:
    for thread in threading.enumerate():
        if thread.name == "torch_lms planner":
            thread.join()


def digest(tensors: list[torch.Tensor]) -> list[str]:
    """Every bit, in little memory."""
    return [hashlib.sha256(t.clone().reshape(-1).view(torch.uint8).numpy()).hexdigest() for t in tensors]


def run(begin: Callable[[], Step]) -> Iterator[list[str]]:
    step = begin()
    for number in range(STEPS):
        yield digest(step(number))
        wait_for_planner()


def limit_for(begin: Callable[[], Step], share: float = 0.6) -> int:
    """What the process holds already, and a share of what a program needs besides."""
    gc.collect()
    torch_lms.swap.count_cpu_allocations()
    held_bytes = torch_lms.stats(reset=True).allocated_bytes
    for _ in run(begin):
        pass
    return held_bytes + int(share * (torch_lms.stats().peak_allocated_bytes - held_bytes))


def on(limit_bytes: int, **options: bool) -> None:
    torch_lms.enable({"cpu": limit_bytes}, min_bytes=MIN_BYTES, **options)
    torch_lms.stats(reset=True)


@counts_exactly
@one_thread()
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_planned_program_is_bit_equal_within_its_limit(program: str) -> None:
    begin = PROGRAMS[program]
    limit_bytes = limit_for(begin, 0.85 if program == "checkpoint" else 0.6)  # that one holds little as it is
    expected = list(run(begin))
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
    begin, odd_step = PROGRAMS["adversarial"], STEPS - 5
    hooks: list[RemovableHandle] = []

    def odd_once() -> Step:
        step = begin()

        def copy_once(_module: nn.Module, _given: object, made: torch.Tensor) -> torch.Tensor:
            hooks.pop().remove()
            return made.clone()

        def stepped(number: int) -> list[torch.Tensor]:
            if number == odd_step:
                hooks.append(nn.modules.module.register_module_forward_hook(copy_once))
            return step(number)

        return stepped

    on(limit_for(begin))
    shares = []
    for _ in run(odd_once):
        shares.append(core.share_in_step())
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
    limit_bytes = limit_for(plain_training, 0.7)
    expected = list(run(plain_training))
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
def test_a_program_is_planned_that_begins_with_a_long_loop_which_no_plan_is_for() -> None:
    """What repeats before the first backward is recorded as a cycle; here it holds more with every turn."""
    limit_bytes, expected = limit_for(plain_training), list(run(plain_training))
    on(limit_bytes)
    x = torch.ones(MIN_BYTES // 4)
    kept = [torch.tanh(x) for _ in range(6000)]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        wait_for_planner()
    assert any("no plan was made" in str(warning.message) for warning in warned)
    kept.clear()
    assert list(run(plain_training)) == expected
    assert torch_lms.current_plan() is not None


@counts_exactly
@one_thread()
def test_where_no_plan_could_be_made_the_program_is_recorded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_bytes, expected = limit_for(plain_training), list(run(plain_training))
    asked: list[Any] = []

    def fails_once(request: Mapping[str, Any], wishes: planning.Wishes) -> Iterator[dict[str, Any]]:
        asked.append(request)
        if len(asked) == 1:
            raise PlanError("expected an answer, found none")
        return answers(request, wishes)

    answers = planning._answers
    monkeypatch.setattr(planning, "_answers", fails_once)
    on(limit_bytes)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert list(run(plain_training)) == expected
    assert torch_lms.current_plan() is not None
    assert sum("no plan was made" in str(warning.message) for warning in warned) == 1


@counts_exactly
@one_thread()
def test_a_program_without_plans_pages_on_demand() -> None:
    on(limit_for(plain_training), swap=False, recompute=False)
    for _ in run(plain_training):
        pass
    assert torch_lms.current_plan() is None
    assert torch_lms.stats().pageouts > 0


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


@counts_exactly
@one_thread()
def test_a_limit_that_no_plan_keeps_is_warned_of_with_the_least_one() -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        on(limit_for(plain_training, 0.45), swap=False)
        for _ in run(plain_training):
            pass
    assert any("expected a limit of at least" in str(warning.message) for warning in warned)
    assert torch_lms.current_plan() is None


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
