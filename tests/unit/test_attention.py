"""When automatic mode watches ops: it learns, sleeps while the memory stays far below the limit, and is armed in time.

Each program has a process of its own: what others have done before decides, too.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import torch
from torch import nn

import torch_lms
from tests.unit.fresh_process import in_fresh_process
from tests.unit.markers import counts_exactly
from tests.unit.trainings import CLASSES, GPT, MIN_BYTES, plain_step
from torch_lms._core import core
from torch_lms.swap import discovery

SMALL, LARGE = 2, 8  # sequences in a batch
OPS_IN_CYCLE = 4096  # csrc/extension/base/Options.h

# Chaos mode has something paged out all the time, so nothing sleeps.
pytestmark = counts_exactly


# --- the programs -----------------------------------------------------------------------------------------------


def batch(rows: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(CLASSES, (rows, 64), generator=generator)
    return tokens, tokens.roll(1).flatten()


class Program:
    """A training of a small GPT, one step at a time."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.model = GPT()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.made: list[torch.Tensor] = []

    def step(self, rows: int) -> str:
        """One step; what automatic mode does after it."""
        self.made.append(plain_step(self.model, self.optimizer, batch(rows, len(self.made))))
        return core.attention()

    def results(self) -> list[bytes]:
        """Every bit of losses, parameters and optimizer state; no tensors, which would count."""
        torch_lms.disable()
        state = [value for state in self.optimizer.state.values() for value in state.values()]
        return [tensor.numpy().tobytes() for tensor in (*self.made, *self.model.state_dict().values(), *state)]


def plain(rows: Sequence[int]) -> tuple[list[bytes], int]:
    """Results and peak of steps without a limit."""
    torch_lms.swap.count_cpu_allocations()
    torch_lms.stats(reset=True)
    program = Program()
    for count in rows:
        program.step(count)
    peak = torch_lms.stats().peak_allocated_bytes
    return program.results(), peak


def begin(limit_bytes: int) -> None:
    torch_lms.enable({"cpu": limit_bytes}, min_bytes=MIN_BYTES)
    torch_lms.stats(reset=True)


# --- to sleep -----------------------------------------------------------------------------------------------------


def train_far_below_the_limit() -> dict[str, Any]:
    expected, peak = plain([SMALL] * 4)
    begin(2 * peak)
    before = torch_lms.stats().allocated_bytes
    watched = [core.observing_ops()]
    seen = [core.attention()]
    program = Program()
    for _ in range(4):
        seen.append(program.step(SMALL))
        watched.append(core.observing_ops())
    stats = torch_lms.stats()
    return {
        "attention": seen,
        "watched": watched,
        "pageouts": stats.pageouts,
        "peak": stats.peak_allocated_bytes - before == peak,
        "same": program.results() == expected,
    }


def test_a_training_far_below_its_limit_is_watched_for_one_cycle() -> None:
    assert in_fresh_process(train_far_below_the_limit) == {
        "attention": ["learning"] + ["asleep"] * 4,
        "watched": [True] + [False] * 4,
        "pageouts": 0,
        "peak": True,
        "same": True,
    }


def train_close_to_the_limit() -> list[str]:
    _, peak = plain([SMALL] * 4)
    begin(peak * 5 // 4)
    program = Program()
    return [program.step(SMALL) for _ in range(5)][1:]  # the first has no optimizer state yet


def test_a_training_close_to_its_limit_is_watched_on() -> None:
    assert in_fresh_process(train_close_to_the_limit) == ["armed"] * 4


def train_with_something_paged_out() -> list[list[str]]:
    _, peak = plain([SMALL] * 2)
    begin(2 * peak)
    out = torch.ones(MIN_BYTES)
    torch_lms.pageout(out)
    torch_lms.wait()
    program = Program()
    seen = []
    for _ in range(2):
        seen.append([program.step(SMALL), torch_lms.swap.state(out)])
    return seen


def test_while_something_is_out_ops_are_watched() -> None:
    seen = in_fresh_process(train_with_something_paged_out)
    assert all(state == "resident" for attention, state in seen if attention == "asleep")


def infer() -> list[Any]:
    begin(64 << 20)
    tensor = torch.zeros(MIN_BYTES)
    for _ in range(OPS_IN_CYCLE // 2):
        tensor.add_(1)
    half = [core.attention(), core.observing_ops()]
    for _ in range(OPS_IN_CYCLE):
        tensor.add_(1)
    return [half, [core.attention(), core.observing_ops()], bool((tensor == OPS_IN_CYCLE * 3 // 2).all())]


def test_a_program_without_a_backward_sleeps_after_many_ops() -> None:
    half, whole, right = in_fresh_process(infer)
    assert half == ["learning", True]
    assert whole == ["asleep", False]
    assert right


def off_and_on() -> list[Any]:
    _, peak = plain([SMALL] * 2)
    program = Program()
    seen: list[Any] = [core.attention()]
    for _ in range(2):
        begin(2 * peak)
        seen += [core.attention(), program.step(SMALL)]
        torch_lms.disable()
        seen += [core.attention(), core.observing_ops()]
    return seen


def test_a_program_may_end_it_while_it_sleeps_and_begin_again() -> None:
    assert in_fresh_process(off_and_on) == ["off"] + 2 * ["learning", "asleep", "off", False]


# --- to be armed ----------------------------------------------------------------------------------------------------


def train_in_sizes(rows: list[int], over: int) -> dict[str, Any]:
    """Steps whose large ones take ``over`` percent of the limit."""
    expected, peak = plain(rows)
    limit_bytes = peak * 100 // over
    begin(limit_bytes)
    program = Program()
    seen = [program.step(count) for count in rows]
    stats = torch_lms.stats()
    return {
        "attention": seen,
        "kept": stats.peak_allocated_bytes <= limit_bytes,
        "exceeded": stats.limit_exceeded,
        "paged": stats.pageouts > 0,
        "same": program.results() == expected,
    }


def test_crossing_three_quarters_of_the_limit_arms_it_until_the_program_fits_again() -> None:
    rows = [SMALL, SMALL, LARGE, SMALL, SMALL, SMALL]
    seen = in_fresh_process(train_in_sizes, rows, 90)
    assert seen["attention"][:3] == ["asleep", "asleep", "armed"]
    assert seen["attention"][-1] == "asleep"
    assert (seen["kept"], seen["exceeded"], seen["same"]) == (True, 0, True)


def test_a_step_that_is_too_large_is_within_the_limit_bit_equal_and_sleep_comes_back() -> None:
    rows = [SMALL, SMALL, LARGE, LARGE, SMALL, SMALL, SMALL, SMALL]
    seen = in_fresh_process(train_in_sizes, rows, 130)
    assert seen["attention"][:4] == ["asleep", "asleep", "armed", "armed"]
    assert seen["attention"][-1] == "asleep"
    assert (seen["kept"], seen["exceeded"], seen["paged"], seen["same"]) == (True, 0, True, True)


def keep_more_than_the_limit() -> dict[str, Any]:
    limit_bytes = 32 << 20
    begin(limit_bytes)
    tensor = torch.zeros(MIN_BYTES)
    for _ in range(OPS_IN_CYCLE + 2):
        tensor.add_(1)
    before = core.attention()
    torch.manual_seed(0)
    kept = [torch.randn(1 << 18) for _ in range(64)]  # 64 MiB
    after = core.attention()
    stats = torch_lms.stats()
    torch_lms.disable()
    torch.manual_seed(0)
    return {
        "attention": [before, after],
        "kept": stats.peak_allocated_bytes <= limit_bytes,
        "exceeded": stats.limit_exceeded,
        "same": all(torch.equal(tensor, torch.randn(1 << 18)) for tensor in kept),
    }


def test_the_same_op_again_and_again_stays_within_the_limit() -> None:
    assert in_fresh_process(keep_more_than_the_limit) == {
        "attention": ["asleep", "armed"],
        "kept": True,
        "exceeded": 0,
        "same": True,
    }


def read_what_was_made_asleep() -> dict[str, Any]:
    limit_bytes = 32 << 20
    begin(limit_bytes)
    tensor = torch.zeros(MIN_BYTES)
    for _ in range(OPS_IN_CYCLE + 2):
        tensor.add_(1)
    made_asleep = [torch.full((1 << 18,), float(number)) for number in range(20)]
    before = core.attention()
    made_armed = [torch.full((1 << 18,), float(number)) for number in range(20, 40)]
    sums = [made.sum().item() for _ in range(3) for made in (*made_asleep, *made_armed)]
    stats = torch_lms.stats()
    return {
        "attention": [before, core.attention()],
        "kept": stats.peak_allocated_bytes <= limit_bytes,
        "paged": stats.pageouts + (stats.dropped_bytes >> 20) > 20,
        "same": sums == [float(number << 18) for _ in range(3) for number in range(40)],
    }


def test_what_was_made_asleep_goes_out_once_it_has_been_seen() -> None:
    assert in_fresh_process(read_what_was_made_asleep) == {
        "attention": ["asleep", "armed"],
        "kept": True,
        "paged": True,
        "same": True,
    }


class Asked(torch.Tensor):
    """Notes what it is asked for."""

    names: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.names.append(function.__name__)
        return super().__torch_function__(function, types, args, kwargs or {})


def read_what_was_made_asleep_beside_a_subclass() -> tuple[dict[str, Any], list[str]]:
    kept = torch.ones(1).as_subclass(Asked)
    Asked.names.clear()
    seen = read_what_was_made_asleep()
    del kept
    return seen, Asked.names


def test_to_look_for_tensors_calls_no_functions_of_subclasses() -> None:
    seen, asked = in_fresh_process(read_what_was_made_asleep_beside_a_subclass)
    assert seen == {"attention": ["asleep", "armed"], "kept": True, "paged": True, "same": True}
    assert asked == []


class Armed(torch.autograd.Function):
    """An op of Python's own whose forward allocates beyond the watermark, then goes on with what it has."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, room: int) -> torch.Tensor:
        kept = [torch.full((1 << 18,), 2.0) for _ in range(room)]
        ctx.save_for_backward(x, kept[0])
        return x * sum(tensor[0].item() for tensor in kept)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, two = ctx.saved_tensors
        held = [torch.full((1 << 18,), 3.0) for _ in range(26)]
        return gradients[0] * two[0] * sum(tensor[-1] for tensor in held) * x.sign().abs(), None


def arm_in_a_backward() -> dict[str, Any]:
    limit_bytes = 32 << 20
    begin(limit_bytes)
    x = torch.ones(1 << 18, requires_grad=True)
    linear = nn.Linear(256, 256)
    for _ in range(2):
        linear(torch.ones(256, 256)).sum().backward()
        linear.zero_grad()
    seen = [core.attention()]
    Armed.apply(x, 8).sum().backward()
    seen.append(core.attention())
    gradient = x.grad
    assert gradient is not None
    stats = torch_lms.stats()
    return {
        "attention": seen,
        "kept": stats.peak_allocated_bytes <= limit_bytes,
        "same": bool((gradient == 2.0 * 3.0 * 26).all()),
    }


def test_it_may_be_armed_in_a_backward() -> None:
    assert in_fresh_process(arm_in_a_backward) == {"attention": ["asleep", "armed"], "kept": True, "same": True}


# --- threads ----------------------------------------------------------------------------------------------------


def train_beside_a_thread() -> dict[str, list[str]]:
    _, peak = plain([SMALL] * 2)
    begin(4 * peak)
    program = Program()
    alone = [program.step(SMALL) for _ in range(2)]
    tensor = torch.zeros(MIN_BYTES)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(tensor.add_, 1).result()
        beside = [core.attention()]
        for _ in range(3):
            pool.submit(tensor.add_, 1).result()
            beside.append(program.step(SMALL))
    return {"alone": alone, "beside": beside, "afterwards": [program.step(SMALL) for _ in range(2)]}


def test_a_second_thread_that_runs_ops_wakes_it_and_keeps_it_awake() -> None:
    seen = in_fresh_process(train_beside_a_thread)
    assert seen["alone"] == ["asleep"] * 2
    assert seen["beside"] == ["armed"] * 4
    assert seen["afterwards"][-1] == "asleep"


def train_beside_a_thread_without_ops() -> list[str]:
    _, peak = plain([SMALL] * 2)
    begin(4 * peak)
    program = Program()
    seen = [program.step(SMALL)]
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    seen.append(core.attention())
    seen += [program.step(SMALL) for _ in range(2)]
    stop.set()
    thread.join()
    return seen


def test_a_second_thread_without_ops_wakes_it_for_a_while() -> None:
    seen = in_fresh_process(train_beside_a_thread_without_ops)
    assert seen[:2] == ["asleep", "armed"]
    assert seen[-1] == "asleep"


class Started(threading.Thread):
    """A thread of a program's own kind."""

    def start(self) -> None:
        super().start()


def start_threads() -> list[str]:
    seen = []
    tensor = torch.zeros(MIN_BYTES)
    begin(64 << 20)
    for make in (threading.Thread, Started, threading.Timer):
        for _ in range(2 * OPS_IN_CYCLE + 4):
            tensor.add_(1)
        seen.append(core.attention())
        thread = make(0, int) if make is threading.Timer else make(target=int)
        thread.start()
        thread.join()
        seen.append(core.attention())
    return seen


def test_every_kind_of_thread_wakes_it() -> None:
    assert in_fresh_process(start_threads) == ["asleep", "armed"] * 3


def look_for_tensors_while_a_thread_builds_tuples() -> list[str]:
    """A tuple that grows must be nobody else's; so another thread must not find it."""
    over, wrong = threading.Event(), []

    def build() -> None:
        while not over.is_set():
            try:
                tuple(float(number) for number in range(40))
            except SystemError as error:
                wrong.append(str(error))

    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=build)
    thread.start()
    try:
        for _ in range(30):
            discovery.make_known()
    finally:
        over.set()
        thread.join()
    return wrong


def test_the_search_for_tensors_leaves_other_threads_alone() -> None:
    assert in_fresh_process(look_for_tensors_while_a_thread_builds_tuples) == []


def start_a_thread_in_a_child() -> int:
    begin(64 << 20)
    tensor = torch.zeros(MIN_BYTES)
    for _ in range(OPS_IN_CYCLE + 2):
        tensor.add_(1)
    assert core.attention() == "asleep"
    child = os.fork()
    if child == 0:
        ran: list[int] = []
        thread = threading.Thread(target=ran.append, args=(1,))
        thread.start()
        thread.join()
        os._exit(0 if ran == [1] else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_threads_begin_in_a_forked_child() -> None:
    assert in_fresh_process(start_a_thread_in_a_child) == 0


class Listing(torch.autograd.Function):
    """Saves a list of tensors, which its node refuses to show once its backward has run."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, x + 1)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def known_beside_a_graph_that_has_run() -> tuple[int, int]:
    begin(64 << 20)
    for _ in range(OPS_IN_CYCLE + 2):
        torch.zeros(1).add_(1)
    assert core.attention() == "asleep"
    leaf = torch.ones(MIN_BYTES, requires_grad=True)
    loss = Listing.apply(leaf)[torch.arange(MIN_BYTES // 2)].sum()
    loss.backward()
    held = [torch.zeros(MIN_BYTES) for _ in range(8)]
    before = torch_lms.stats().tracked_storages
    discovery.make_known()
    return torch_lms.stats().tracked_storages - before, len(held)


def test_the_search_goes_on_beside_a_graph_that_has_run() -> None:
    found, held = in_fresh_process(known_beside_a_graph_that_has_run)
    assert found >= held
