"""Threads that page and compute at once, and ops that end in an exception."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.unit.paging_states import STATES, round_trip
from torch_lms._core import core
from torch_lms.errors import LmsError, PageoutError

library = torch.library.Library(
    "torch_lms_tests", "FRAGMENT"
)  # what custom_op makes may be called without the dispatcher

THREADS = 4
ROUNDS = 60


def together(*bodies: Callable[[], Any]) -> list[Any]:
    """Runs each on a thread of its own, all beginning at once; raises what one of them raised."""
    barrier = threading.Barrier(len(bodies))

    def run(body: Callable[[], Any]) -> Any:
        barrier.wait()
        return body()

    with ThreadPoolExecutor(len(bodies)) as pool:
        return [future.result() for future in [pool.submit(run, body) for body in bodies]]


def page_out(paged: ModuleType, *tensors: torch.Tensor) -> None:
    """Again while another thread waits: see `test_pageout_while_another_thread_waits_is_enqueued`."""
    while True:
        try:
            paged.pageout(*tensors)
        except LmsError as error:
            if "open transfer queue" not in str(error):
                raise
        else:
            return


def page_at_random(paged: ModuleType, tensors: list[torch.Tensor], seed: int) -> None:
    choose = random.Random(seed)
    for _ in range(ROUNDS):
        tensor = choose.choice(tensors)
        action = choose.choice(("out", "out", "in", "wait"))
        if action == "out":
            with contextlib.suppress(PageoutError):  # an op of another thread may be using it
                page_out(paged, tensor)
        elif action == "in":
            paged.prefetch(tensor)
        else:
            paged.wait()


@pytest.mark.parametrize("size", [100, 1 << 17])
def test_threads_with_storages_of_their_own_do_not_disturb_each_other(size: int, paged: ModuleType) -> None:
    def work(number: int) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            tensors = [torch.full((size,), float(number)) for _ in range(3)]
            for step in range(ROUNDS):
                for tensor in tensors:
                    tensor.add_(1)
                page_out(paged, tensors[step % 3])
                if step % 4 == 0:
                    paged.prefetch(tensors)
                if step % 7 == 0:
                    paged.wait()
            return torch.stack(tensors)

        return run

    results = together(*(work(number) for number in range(THREADS)))
    for number, result in enumerate(results):
        assert torch.equal(result, torch.full((3, size), float(number + ROUNDS)))


@pytest.mark.parametrize("size", [100, 1 << 17])
def test_shared_storages_read_by_threads_while_others_page_them(size: int, paged: ModuleType) -> None:
    tensors = [torch.full((size,), float(number)) for number in range(5)]
    expected = torch.stack(tensors).sum(0)

    def read() -> bool:
        return all(torch.equal(torch.stack(tensors).sum(0), expected) for _ in range(ROUNDS))

    def page() -> None:
        page_at_random(paged, tensors, seed=size)

    assert together(read, page, read, page)[::2] == [True, True]


def test_shared_storage_written_under_a_lock_loses_no_write(paged: ModuleType) -> None:
    tensor = torch.zeros(5000)
    lock = threading.Lock()

    def write() -> None:
        for _ in range(ROUNDS):
            with lock:
                tensor.add_(1)

    def page() -> None:
        page_at_random(paged, [tensor], seed=3)

    together(write, page, write, page)
    assert torch.equal(tensor, torch.full((5000,), 2.0 * ROUNDS))


def test_parts_of_one_storage_written_by_threads_keep_every_write(paged: ModuleType) -> None:
    whole = torch.zeros(THREADS, 3000)

    def write(row: torch.Tensor) -> Callable[[], None]:
        def run() -> None:
            for _ in range(ROUNDS):
                row.add_(1)

        return run

    together(*(write(row) for row in whole), lambda: page_at_random(paged, [whole], seed=4))
    assert torch.equal(whole, torch.full((THREADS, 3000), float(ROUNDS)))


def test_threads_that_train_copies_of_a_model_get_equal_results(paged: ModuleType) -> None:
    def train(page: bool) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(16, 16, generator=generator))
        optimizer = torch.optim.Adam([weight], 0.01)
        for _ in range(8):
            loss = torch.tanh(torch.randn(4, 16, generator=generator) @ weight).square().sum()
            if page:
                page_out(paged, weight, loss)
                paged.wait()
            optimizer.zero_grad()
            loss.backward()
            if page and weight.grad is not None:
                page_out(paged, weight, weight.grad)
            optimizer.step()
        return [weight.detach(), loss.detach()]

    plain = train(False)
    for weight, loss in together(*[lambda: train(True)] * THREADS):
        assert torch.equal(weight, plain[0])
        assert torch.equal(loss, plain[1])


def test_tensors_die_in_one_thread_while_another_pages_them(paged: ModuleType, chaos: bool) -> None:
    slots: list[torch.Tensor | None] = [None] * 8

    def make() -> None:
        for number in range(ROUNDS * 4):
            slots[number % 8] = torch.full((1000,), float(number))

    def page() -> None:
        for number in range(ROUNDS * 4):
            tensor = slots[(number * 3) % 8]
            if tensor is not None:
                with contextlib.suppress(PageoutError):
                    paged.pageout(tensor)
                assert tensor[0] == tensor[-1]

    together(make, page, page)
    paged.wait()
    slots.clear()
    paged.wait()
    if not chaos:
        assert paged.stats().paged_out_bytes == 0
        assert paged.stats().host_used_bytes == 0


def test_automatic_mode_keeps_threads_apart_within_a_limit(paged: ModuleType) -> None:
    limit_bytes = 24 << 20

    def work(number: int) -> Callable[[], list[float]]:
        def run() -> list[float]:
            tensors = [torch.full((1 << 18,), float(number + i)) for i in range(8)]
            for _ in range(5):
                for tensor in tensors:
                    tensor.add_(1)
            return [tensor.min().item() + tensor.max().item() for tensor in tensors]

        return run

    paged.enable(limit=limit_bytes, min_bytes=1 << 16)
    results = together(*(work(number * 10) for number in range(THREADS)))
    assert paged.stats().peak_allocated_bytes <= limit_bytes
    assert results == [[2.0 * (number * 10 + i + 5) for i in range(8)] for number in range(THREADS)]


def standing(a: torch.Tensor) -> torch.Tensor:
    """An op that goes on until it is told to end."""
    begun.set()
    go_on.wait()
    return a + 1


begun, go_on = threading.Event(), threading.Event()
library.define("standing(Tensor a) -> Tensor")
library.impl("standing", standing, "CPU")


@pytest.mark.parametrize("something_is_out", [True, False])
def test_nothing_goes_out_under_an_op_of_another_thread(something_is_out: bool, paged: ModuleType) -> None:
    tensor, other = torch.ones(1000), torch.ones(1000)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()  # beside a thread that is there ops stay observed
        round_trip([tensor])
        tensor.add_(1)
        if something_is_out:
            round_trip([other])
        else:
            paged.wait()
        begun.clear()
        go_on.clear()
        result = pool.submit(torch.ops.torch_lms_tests.standing, tensor)
        begun.wait()
        try:
            with contextlib.suppress(PageoutError):  # to refuse would be right too
                paged.pageout(tensor)
            for _ in range(2000):
                torch.zeros(1).add_(1)  # where page-outs are committed
            assert paged.swap.state(tensor) != "paged_out"
        finally:
            go_on.set()
        assert torch.equal(result.result(), torch.full((1000,), 3.0))


# --- waits --------------------------------------------------------------------------------------------------


def test_pageout_while_another_thread_waits_is_enqueued(paged: ModuleType) -> None:
    mine, others = ([torch.full((200,), float(i)) for i in range(count)] for count in (2000, 20))
    done = threading.Event()

    def wait() -> None:
        while not done.is_set():
            torch._foreach_add_(others, 1)
            page_out(paged, *others)
            paged.wait()

    def request() -> None:
        try:
            for _ in range(ROUNDS):
                torch._foreach_add_(mine, 1)
                paged.pageout(mine)
        finally:
            done.set()

    together(wait, request)
    paged.wait()
    assert [tensor[0].item() for tensor in mine] == [i + ROUNDS for i in range(2000)]


def test_waits_of_several_threads_leave_the_queue_open(paged: ModuleType, chaos: bool) -> None:
    tensors = [torch.full((1 << 18,), float(i)) for i in range(32)]
    for _ in range(20):
        paged.pageout(tensors)
        paged.wait()
        paged.prefetch(tensors)
        together(*[core.wait_pageins] * THREADS)
        paged.pageout(tensors[0])
        core.wait_pageouts()
        assert core.prefetch(tensors[:1], start=False) == 1 or chaos
        paged.wait()


# --- exceptions ---------------------------------------------------------------------------------------------


def _wrong_shapes(a: torch.Tensor, b: torch.Tensor) -> Any:
    return torch.mm(a, b[:, :3].t().contiguous().t()[:1].expand(3, 3))


def _wrong_dtype(a: torch.Tensor, b: torch.Tensor) -> Any:
    return a.index_select(0, b)


def _out_of_range(a: torch.Tensor, b: torch.Tensor) -> Any:
    return a[torch.tensor([99])] + b


def _raised_in_backward(a: torch.Tensor, b: torch.Tensor) -> Any:
    x = a.clone().requires_grad_()
    hidden = x * b

    def fail(_: torch.Tensor) -> None:
        raise ValueError("a hook's own")

    hidden.register_hook(fail)
    (hidden * b).sum().backward()


def _raised_in_a_library_op(a: torch.Tensor, b: torch.Tensor) -> Any:
    return _failing_op(a, b)


@torch.library.custom_op("torch_lms_tests::failing", mutates_args=("a",))
def _failing_op(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.mul_(1)
    raise ValueError("the op's own")


FAILURES = [_wrong_shapes, _wrong_dtype, _out_of_range, _raised_in_backward, _raised_in_a_library_op]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("fail", FAILURES)
def test_tensors_of_an_op_that_raised_stay_whole_and_pageable(
    fail: Callable[[torch.Tensor, torch.Tensor], Any], state: str, paged: ModuleType, chaos: bool
) -> None:
    a, b = torch.arange(16.0).view(4, 4), torch.ones(4, 4)
    STATES[state]([a, b])
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        fail(a, b)
    assert round_trip([a, b]) == 0
    if not chaos:
        assert {paged.swap.state(a), paged.swap.state(b)} == {"paged_out"}
    assert torch.equal(a, torch.arange(16.0).view(4, 4))
    assert torch.equal(b, torch.ones(4, 4))


def test_op_that_raised_on_another_thread_lets_go_of_its_tensors(paged: ModuleType) -> None:
    a, b = torch.ones(4, 4), torch.ones(3, 3)

    def fail() -> str:
        with contextlib.suppress(PageoutError):
            page_out(paged, a, b)
        try:
            a @ b
        except RuntimeError as error:
            return type(error).__name__
        return "nothing"

    assert together(*[fail] * THREADS) == ["RuntimeError"] * THREADS
    assert round_trip([a, b]) == 0


def test_request_inside_an_op_is_declined_for_what_the_op_uses(paged: ModuleType, chaos: bool) -> None:
    enqueued: list[int] = []

    def paging(a: torch.Tensor) -> torch.Tensor:
        enqueued.append(paged.pageout(a))
        return a + 1

    own_library = torch.library.Library("torch_lms_tests", "FRAGMENT")
    own_library.define("paging(Tensor a) -> Tensor")
    own_library.impl("paging", paging, "CPU")
    a = torch.ones(10)
    round_trip([a])
    assert torch.equal(torch.ops.torch_lms_tests.paging(a), torch.full((10,), 2.0))
    assert enqueued == [0]
    assert round_trip([a]) == 0
    assert torch.equal(a, torch.ones(10))
