"""Several threads that page at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

import pytest
import torch

import torch_lms
from tests.unit.markers import counts_exactly
from torch_lms.errors import LmsError, PageoutError
from torch_lms.swap import SwapEnv


def run_threads(functions: Iterable[Callable[[], None]]) -> list[BaseException]:
    """Runs each in a thread of its own; what they raised."""
    raised: list[BaseException] = []

    def run(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


@pytest.mark.xfail(
    strict=True,
    raises=LmsError,
    reason="a queue that one thread waits for is locked, and refuses what another thread adds",
)
@counts_exactly
def test_a_thread_may_page_while_another_one_waits() -> None:
    over = threading.Event()

    def page() -> None:
        tensor = torch.rand(100)
        try:
            for _ in range(5000):
                torch_lms.pageout(tensor)
                torch_lms.wait()
                if over.is_set():
                    return
        finally:
            over.set()

    for error in run_threads([page] * 4):
        raise error


@pytest.mark.xfail(
    strict=True,
    raises=torch.OutOfMemoryError,
    reason="wait_actions restores the lock that it found: of two that overlap, the last leaves the queue locked",
)
@counts_exactly
def test_waits_that_overlap_leave_the_queues_open() -> None:
    torch_lms.enable({"cpu": "64MiB"})
    for _ in range(10):
        large = [torch.ones(1 << 20) for _ in range(12)]
        torch_lms.wait()
        torch_lms.pageout(large)
        assert run_threads([torch_lms.wait] * 3) == []
        del large
        kept = [torch.ones(1 << 20) for _ in range(20)]
        assert all(bool((tensor == 1).all()) for tensor in kept)


def test_tensors_of_several_threads_keep_every_bit() -> None:
    wrong: list[int] = []

    def page(seed: int) -> None:
        tensor = torch.full((10_000,), float(seed))
        for count in range(50):
            with SwapEnv() as env:
                with suppress(LmsError):  # another thread waits
                    env.pageout(tensor)
                tensor.add_(1)
                env.prefetch(tensor)
            if not torch.equal(tensor, torch.full_like(tensor, float(seed + count + 1))):
                wrong.append(seed)

    assert run_threads(partial(page, seed) for seed in range(4)) == []
    assert wrong == []


def test_a_tensor_that_others_read_may_go_out_at_any_time() -> None:
    shared = torch.rand(100_000)
    expected = [shared.sum(), shared[7::13].max()]
    wrong: list[int] = []
    readers = threading.Barrier(3)
    over = threading.Event()

    def read() -> None:
        readers.wait()
        for count in range(200):
            if not (torch.equal(shared.sum(), expected[0]) and torch.equal(shared[7::13].max(), expected[1])):
                wrong.append(count)
        over.set()

    def page() -> None:
        readers.wait()
        while not over.is_set():
            with suppress(PageoutError):  # an op is using it
                torch_lms.pageout(shared)
            torch_lms.wait()

    assert run_threads([read, read, page]) == []
    assert wrong == []
