"""Ops that other threads begin while nothing is out are not observed: a page-out by hand waits for them."""

from __future__ import annotations

import gc
import itertools
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

import torch_lms
from tests.conftest import settle
from tests.unit.foreign_code import load, needs_compiler
from tests.unit.fresh_process import in_fresh_process, run_python
from torch_lms._core import core
from torch_lms.errors import PageoutError

NUMEL = 1 << 17  # so that an op takes a while


def test_a_pageout_waits_for_ops_that_began_unseen(paged: ModuleType) -> None:
    tensors = [torch.full((NUMEL,), float(number)) for number in range(5)]
    stop, wrong = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            together = torch.stack(tensors)
            wrong.extend(row for row in range(5) if together[row].min() != row or together[row].max() != row)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for turn in range(600):
            paged.pageout(tensors[turn % 5])
            paged.wait()
            paged.prefetch(tensors)
            paged.wait()  # nothing is out now
            stop.wait(0.001)  # the readers go on
    finally:
        stop.set()
        for reader in readers:
            reader.join()
    assert wrong == []


@needs_compiler
@pytest.mark.parametrize("others", [0, 2])
def test_a_pageout_waits_for_an_op_that_wants_python_s_lock(others: int, paged: ModuleType, chaos: bool) -> None:
    foreign, turns = load(), 20 if others else 300  # beside a thread that computes each turn waits for the lock
    tensor, stop, sums = torch.full((NUMEL,), 3.0), threading.Event(), list[float]()

    def run_op() -> None:
        sums.append(torch.ops.torch_lms_foreign.sum(tensor, turns))

    def run_ops() -> None:
        while not stop.is_set():
            torch.ones(1).sum()

    def run_python() -> None:
        while not stop.is_set():
            pass

    for _ in range(5):
        settle()
        assert chaos or not core.observing_ops()
        stop.clear()
        foreign.begin_turns()
        threads = [threading.Thread(target=target) for target in (run_op, *(run_ops, run_python)[:others])]
        for thread in threads:
            thread.start()
        while foreign.last_turn() == 0:
            time.sleep(0)
        paged.pageout(tensor)
        reached = foreign.last_turn()
        stop.set()
        for thread in threads:
            thread.join()
        assert chaos or reached == turns  # in chaos mode the op is seen, and its end is not waited for
    assert sums == [3.0 * NUMEL * turns] * 5


def wait_for_an_op_that_wants_the_lock() -> None:
    foreign, turns, tensor = load(), 300, torch.full((NUMEL,), 3.0)
    torch_lms.pageout(tensor)  # takes its time once
    settle()
    other = threading.Thread(target=lambda: torch.ops.torch_lms_foreign.sum(tensor, turns))
    other.start()
    while foreign.last_turn() == 0:
        time.sleep(0)
    torch_lms.pageout(tensor)
    reached = foreign.last_turn()
    other.join()
    assert (reached, core.waits_for_unseen_ops()) == (turns, (1, 0))


# As some sandboxes do.
HIDES_SLEEP = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

static FILE *open_unless_hidden(const char *path, const char *mode, const char *name) {
  const size_t length = strlen(path);
  if (length > 8 && strcmp(path + length - 8, "/syscall") == 0) {
    errno = EACCES;
    return NULL;
  }
  return ((FILE * (*)(const char *, const char *)) dlsym(RTLD_NEXT, name))(path, mode);
}
FILE *fopen(const char *path, const char *mode) { return open_unless_hidden(path, mode, "fopen"); }
FILE *fopen64(const char *path, const char *mode) { return open_unless_hidden(path, mode, "fopen64"); }
"""


@needs_compiler
def test_where_nothing_tells_what_a_thread_sleeps_in_it_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load()  # compiled by this process
    (tmp_path / "hides.c").write_text(HIDES_SLEEP)
    compiler = shutil.which("gcc") or shutil.which("cc") or "c++"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", "hides.so", "hides.c", "-ldl"], cwd=tmp_path, check=True)
    monkeypatch.setenv("LD_PRELOAD", str(tmp_path / "hides.so"))
    ended = run_python("-c", f"from {__name__} import *; {wait_for_an_op_that_wants_the_lock.__name__}()")
    assert ended.returncode == 0, ended.stderr


@pytest.mark.skipif(sys.version_info < (3, 11), reason="nothing tells of threads' instructions")
def test_a_loop_that_calls_nothing_is_no_op(paged: ModuleType, chaos: bool) -> None:
    tensor, stop = torch.full((NUMEL,), 3.0), list[bool]()

    def run_loop() -> None:
        for _ in itertools.repeat(None):
            if stop:
                break

    loop = threading.Thread(target=run_loop)
    loop.start()
    try:
        time.sleep(0.01)  # it is in the loop
        waits, in_vain = core.waits_for_unseen_ops()
        for _ in range(3):
            paged.pageout(tensor)
            paged.wait()
            assert tensor.sum().item() == 3.0 * NUMEL
            core.pagein_all()  # so that the next one waits for ops again
        assert chaos or core.waits_for_unseen_ops() == (waits + 3, in_vain)  # in chaos mode none waits
    finally:
        stop.append(True)
        loop.join()


def test_automatic_mode_waits_for_ops_that_began_before_it(paged: ModuleType, chaos: bool) -> None:
    tensor, done = torch.zeros(NUMEL), threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        waits = core.waits_for_unseen_ops()[0]
        paged.enable({"cpu": "1GiB"})
        assert chaos or core.waits_for_unseen_ops()[0] == waits + 1  # in chaos mode all are observed
        waits = core.waits_for_unseen_ops()[0]
        paged.pageout(tensor)  # ops have been observed since then
        paged.enable({"cpu": "2GiB"})
        assert core.waits_for_unseen_ops()[0] == waits
    finally:
        done.set()
        other.join()


class PagesOutAtItsEnd:
    """Which is when Python collects garbage: it refers to itself."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        torch_lms.pageout(torch.ones(NUMEL))


def test_finalizers_page_out_beside_a_wait_for_ops(paged: ModuleType) -> None:
    tensor, stop = torch.full((NUMEL,), 3.0), threading.Event()

    def wait_below(depth: int) -> bool:
        return wait_below(depth - 1) if depth > 0 else stop.wait(0.001)

    def run_python() -> None:
        while not wait_below(30):
            pass

    threads = [threading.Thread(target=run_python) for _ in range(2)]
    thresholds = gc.get_threshold()
    for thread in threads:
        thread.start()
    try:
        for objects in range(5, 60, 5):
            gc.disable()
            PagesOutAtItsEnd()
            gc.set_threshold(gc.get_count()[0] + objects)  # soon: a look at a thread makes one for each function
            gc.enable()
            paged.pageout(tensor)
            paged.wait()
            assert tensor.sum().item() == 3.0 * NUMEL
            core.pagein_all()  # so that the next one waits for ops again
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()
        stop.set()
        for thread in threads:
            thread.join()


def test_ops_stay_observed_beside_other_threads_until_all_is_brought_back(paged: ModuleType, chaos: bool) -> None:
    tensor, done = torch.zeros(NUMEL), threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        with paged.SwapEnv() as env:
            env.pageout(tensor)
            paged.wait()
            assert tensor.sum().item() == 0
            torch.ones(1).sum()  # what has come in is settled
            assert core.observing_ops()
        assert chaos or not core.observing_ops()  # in chaos mode ops are always observed
    finally:
        done.set()
        other.join()


def test_ops_are_not_observed_for_ever_beside_other_threads(paged: ModuleType, chaos: bool) -> None:
    tensor, done = torch.zeros(NUMEL), threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        for _ in range(2):  # also another time
            paged.pageout(tensor)
            paged.wait()
            assert tensor.sum().item() == 0
            assert core.observing_ops()
            for _ in range(3000):
                torch.ones(1)
            assert chaos or not core.observing_ops()  # in chaos mode ops are always observed
    finally:
        done.set()
        other.join()


def observed_after_a_refused_pageout() -> bool:
    pinned = torch.zeros(NUMEL)
    torch_lms.pin(pinned)
    with pytest.raises(PageoutError):
        torch_lms.pageout(pinned)
    return core.observing_ops()


def test_ops_are_not_observed_for_a_pageout_that_was_refused(chaos: bool) -> None:
    # Beside another thread they stay observed, and what runs the tests has some.
    assert in_fresh_process(observed_after_a_refused_pageout) == chaos
