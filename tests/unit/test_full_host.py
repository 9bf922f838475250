"""Steps that neither the device nor the host has room for: until there is a plan, what can be made again is dropped."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # PyTorch's own name for it

import torch_lms
from tests.unit import foreign_code
from tests.unit.error_messages import raises_saying
from tests.unit.fresh_process import in_fresh_process
from tests.unit.markers import counts_exactly
from tests.unit.planned_programs import (
    Step,
    batch,
    cast,
    cubed,
    digest,
    gradients_of,
    hooked,
    in_place,
    model_of,
    wait_for_planner,
)
from tests.unit.trainings import MIN_BYTES, one_thread
from torch_lms._core import core
from torch_lms.swap import SwapEnv, pin, unpin
from torch_lms.swap.planning import last_trace

ROWS = 1024
LAYERS = 8
STEPS = 8
SHARE = 0.45  # of what a step needs: the device has it, and the host

Forward = Callable[[nn.Sequential, torch.Tensor], torch.Tensor]


def plain(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def chained(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    """Each is made from the one before, and kept."""
    x.requires_grad_()
    for _ in range(64):
        x = torch.tanh(x)
    return model[0](x)


def rewritten(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    """What others are made from is written to while they may be dropped, and is not needed as it was."""
    scale = torch.ones_like(x)
    for layer in model:
        x = layer(x) + scale * 0.1
        scale += 1
    return x


def training(forward: Forward = plain, rows: int = ROWS, **options: object) -> Step:
    model = model_of(LAYERS, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(number: int) -> list[torch.Tensor]:
        torch.manual_seed(number)
        optimizer.zero_grad()
        loss = forward(model, batch(number, rows)).square().mean()
        loss.backward()
        made = [loss.detach().clone(), *gradients_of(model), *(buffer.clone() for buffer in model.buffers())]
        optimizer.step()
        return made

    return step


def interrupted() -> Step:
    """Every other forward fails near its end, when much has been dropped, and is begun again."""
    fails = [False]
    step = training(partial(_stopping, fails))

    def stepped(number: int) -> list[torch.Tensor]:
        fails[0] = number % 2 == 0
        if fails[0]:
            with pytest.raises(RuntimeError, match="as asked"):
                step(number)
            fails[0] = False
        return step(number)

    return stepped


def _stopping(fails: list[bool], model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    x = model(x)
    if fails[0]:
        raise RuntimeError("as asked")
    return x


PROGRAMS: dict[str, Callable[[], Step]] = {
    "training": training,
    "dropout": partial(training, dropout=0.2),
    "batch norm": partial(training, norm=True),
    "autocast": partial(training, cast),
    "custom function": partial(training, cubed),
    "saved tensor hooks": partial(training, hooked),
    "in place": partial(training, in_place),
    "chain": partial(training, chained),
    "rewritten": partial(training, rewritten),
    "exceptions": interrupted,
}


def run(begin: Callable[[], Step], steps: int = STEPS) -> Iterator[list[str]]:
    step = begin()
    for number in range(steps):
        yield digest(step(number))
        wait_for_planner()


@pytest.fixture(autouse=True)
def host_limit_restored(paged: ModuleType) -> Iterator[None]:
    pin(tensor := torch.ones(1))  # the device's pool exists from here on
    unpin(tensor)
    before = paged.stats().host_limit_bytes
    yield
    torch_lms.disable()
    SwapEnv(host_limit=before)


def on(begin: Callable[[], Step], share: float = SHARE, host_share: float = SHARE, **options: bool) -> None:
    """Automatic mode, with too little room for a step on the device and the host together."""
    gc.collect()
    torch_lms.swap.count_cpu_allocations()
    held_bytes = torch_lms.stats(reset=True).allocated_bytes
    for _ in run(begin, 1):
        pass
    needed_bytes = torch_lms.stats().peak_allocated_bytes - held_bytes
    limit_bytes, host_bytes = held_bytes + int(share * needed_bytes), int(host_share * needed_bytes)
    torch_lms.enable({"cpu": limit_bytes}, min_bytes=MIN_BYTES, host_limit=host_bytes, **options)
    torch_lms.stats(reset=True)


def check_bit_equal(begin: Callable[[], Step]) -> None:
    expected = list(run(begin))
    on(begin)
    for number, (made, same) in enumerate(zip(run(begin), expected, strict=True)):
        assert made == same, f"step {number}"
        assert number != 0 or torch_lms.stats().recomputed_bytes > 0


@counts_exactly
@one_thread()
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_step_beyond_both_limits_is_bit_equal(program: str) -> None:
    check_bit_equal(PROGRAMS[program])
    assert torch_lms.stats().peak_allocated_bytes <= torch_lms.stats().limit_bytes


@counts_exactly
@one_thread()
@pytest.mark.parametrize("program", [name for name in PROGRAMS if name != "exceptions"])
def test_without_recompute_the_host_is_full(program: str) -> None:
    on(PROGRAMS[program], recompute=False)
    with raises_saying(torch.OutOfMemoryError, found="limit", do="raise host_limit="):
        next(run(PROGRAMS[program]))


@counts_exactly
@one_thread()
def test_a_plan_takes_over() -> None:
    expected = list(run(training))
    on(training)
    shares = []
    for made, same in zip(run(training), expected, strict=True):
        assert made == same
        shares.append(core.share_in_step())
    assert torch_lms.current_plan() is not None
    assert shares[-1] > 0.95


@counts_exactly
@one_thread()
def test_what_is_dropped_changes_nothing_of_what_is_recorded() -> None:
    found = []
    for host_share in (SHARE, 4.0):
        on(training, host_share=host_share)
        step = training()
        step(0)
        assert (torch_lms.stats().recomputable_bytes > 0) == (host_share == SHARE)
        while (trace := last_trace()) is None:
            step(1)
            wait_for_planner()
        ops = [(op.name, op.inputs, op.outputs) for op in trace.ops]
        storages = [(one.bytes, one.producer, one.recurring, one.writes, one.released) for one in trace.storages]
        made_from = [one.recompute and one.recompute.inputs for one in trace.storages]
        found.append((ops, storages, made_from))
        torch_lms.disable()
    assert found[0] == found[1]


@counts_exactly
@one_thread()
def test_a_program_far_from_the_hosts_limit_makes_nothing_again() -> None:
    on(training, host_share=4.0)
    step = training()
    step(0)
    assert torch_lms.stats().pageouts > 0
    assert torch_lms.stats().recomputable_bytes == 0


@counts_exactly
@one_thread()
def test_a_program_on_another_thread_may_be_watched() -> None:
    failed: list[BaseException] = []

    def train() -> None:
        try:
            check_bit_equal(training)
        except BaseException as error:  # the main thread's to raise
            failed.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    kept = torch.ones(MIN_BYTES)
    while thread.is_alive():
        kept.add_(1)
        thread.join(0.01)
    assert failed == []


@counts_exactly
@one_thread()
def test_threads_use_what_is_dropped() -> None:
    expected = list(run(training))
    kept: list[torch.Tensor] = []
    ended = threading.Event()
    wrong: list[torch.Tensor] = []

    def keeping(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
        for layer in model:
            kept.append(made := layer.up(layer.before(x)))
            x = x + layer.down(F.gelu(made))
        return x

    def look() -> None:
        while not ended.wait(0.001):
            wrong.extend(tensor for tensor in list(kept) if not torch.equal(tensor.detach(), tensor.detach()))
            kept.clear()

    on(training)
    thread = threading.Thread(target=look)
    thread.start()
    try:
        for made, same in zip(run(partial(training, keeping)), expected, strict=True):
            assert made == same
    finally:
        ended.set()
        thread.join()
    assert wrong == []


@counts_exactly
@one_thread()
def test_a_replay_that_finds_no_room_says_so_and_the_next_step_is_right() -> None:
    expected = next(run(training))
    on(training)
    limit_bytes, host_bytes = torch_lms.stats().limit_bytes, torch_lms.stats().host_limit_bytes
    model = model_of(LAYERS)
    loss = model(batch(0, ROWS)).square().mean()
    assert torch_lms.stats().recomputable_bytes > 0
    torch_lms.enable({"cpu": limit_bytes // 16}, min_bytes=MIN_BYTES, host_limit=host_bytes)
    with pytest.raises(RuntimeError, match="Raise the limit"):
        loss.backward()
    torch_lms.enable({"cpu": limit_bytes}, min_bytes=MIN_BYTES, host_limit=host_bytes)
    del loss, model
    assert next(run(training)) == expected


def read_in_a_child() -> tuple[int, bool]:
    """How a forked child ends that looks at more than there is room for, and whether the parent finds it all."""
    torch_lms.enable({"cpu": 2_000_000}, min_bytes=MIN_BYTES, host_limit=2_000_000)
    made = [torch.full((256, 64), float(number)) for number in range(70)]
    assert torch_lms.stats().recomputable_bytes > 0
    child = os.fork()
    if child == 0:
        refused = 0
        for number, one in enumerate(made):
            try:
                if float(one[0, 0]) != number:
                    os._exit(1)
            except RuntimeError as error:
                refused += "expected room" in str(error)
        os._exit(2 if refused else 3)
    ended = os.waitpid(child, 0)[1]
    return ended, all(float(one[0, 0]) == number for number, one in enumerate(made))


@counts_exactly
def test_what_has_no_room_before_a_fork_is_refused_in_the_child() -> None:
    ended, found = in_fresh_process(read_in_a_child)
    assert os.waitstatus_to_exitcode(ended) == 2
    assert found


tells_of_writes = pytest.mark.skipif(not core.has_materializer, reason="nothing tells of the write before PyTorch 2.13")


class Written:
    """Another extension writes, outside of ops, to what an op made; in the first steps it does not."""

    def __init__(self, from_step: int = 0) -> None:
        self._from_step = from_step

    def __call__(self, model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
        for layer in model:
            made = F.gelu(layer.up(layer.before(x)))
            if self._from_step <= 0:
                foreign_code.load().write("data_ptr", made.detach(), 0.5, 0)
            x = x + layer.down(made)
        self._from_step -= 1
        return x


@counts_exactly
@one_thread()
@foreign_code.needs_compiler
@tells_of_writes
def test_what_another_extension_writes_is_not_dropped_where_the_host_is_full() -> None:
    check_bit_equal(lambda: training(Written()))


@counts_exactly
@one_thread()
@foreign_code.needs_compiler
@tells_of_writes
def test_what_another_extension_begins_to_write_is_not_made_again_as_it_was() -> None:
    def begin() -> Step:
        return training(Written(from_step=5))

    expected = list(run(begin))
    on(begin, host_share=4.0, swap=False)
    for number, (made, same) in enumerate(zip(run(begin), expected, strict=True)):
        assert made == same, f"step {number}"
        assert number != 4 or torch_lms.stats().recomputed_bytes > 0  # by a plan that knows nothing of it


@counts_exactly
@one_thread()
@foreign_code.needs_compiler
@tells_of_writes
def test_what_another_extension_wrote_in_a_recorded_step_is_not_planned_to_be_made_again() -> None:
    def begin() -> Step:
        return training(Written())

    expected = list(run(begin))
    on(begin, host_share=4.0)
    for number, (made, same) in enumerate(zip(run(begin), expected, strict=True)):
        assert made == same, f"step {number}"
    trace = last_trace()
    assert trace is not None
    taken = [one for one in trace.storages if one.why_not_recompute == "its address was taken outside of ops"]
    assert sum(trace.ops[one.producer].name == "aten::gelu" for one in taken if one.producer is not None) >= LAYERS


# --- a host that has been full, and is not any more -------------------------------------------------------


@counts_exactly
@one_thread()
def test_a_host_with_more_room_than_before_makes_nothing_again() -> None:
    on(training)
    training()(0)
    assert torch_lms.stats().recomputable_bytes > 0
    limit_bytes, host_bytes = torch_lms.stats().limit_bytes, torch_lms.stats().host_limit_bytes
    torch_lms.enable({"cpu": limit_bytes}, min_bytes=MIN_BYTES, host_limit=8 * host_bytes)
    torch_lms.stats(reset=True)
    training()(0)
    assert torch_lms.stats().pageouts > 0
    assert torch_lms.stats().recomputable_bytes == 0
