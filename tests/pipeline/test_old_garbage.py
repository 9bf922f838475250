"""Steps put off collections of old objects, and of these alone."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from torch_lms.pipeline.old_garbage import old_garbage_later


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    yield before
    assert gc.get_threshold() == before


class Circle:
    def __init__(self) -> None:
        self.own = self


def test_old_objects_wait_and_young_ones_do_not() -> None:
    found: list[int] = []
    gc.callbacks.append(lambda phase, info: found.append(info["generation"]))
    try:
        with old_garbage_later():
            young = weakref.ref(Circle())
            gone = len([Circle() for _ in range(200_000)])
            assert young() is None
    finally:
        gc.callbacks.pop()
    assert gone == 200_000
    assert 1 in found
    assert 2 not in found


def test_thresholds_come_back_after_an_error(thresholds: tuple[int, int, int]) -> None:
    def step() -> None:
        with old_garbage_later():
            assert gc.get_threshold()[:2] == thresholds[:2]
            assert gc.get_threshold()[2] > 10**6
            raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        step()


def test_the_last_thread_that_leaves_puts_them_back(thresholds: tuple[int, int, int]) -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with old_garbage_later():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with old_garbage_later():
        thread.start()
        entered.wait()
    assert gc.get_threshold()[2] > 10**6
    leave.set()
    thread.join()
    assert gc.get_threshold() == thresholds


def test_what_the_program_sets_meanwhile_stays(thresholds: tuple[int, int, int]) -> None:
    with old_garbage_later():
        gc.set_threshold(500, 5, 3)
    assert gc.get_threshold() == (500, 5, 3)
    gc.set_threshold(*thresholds)
