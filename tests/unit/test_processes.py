"""Forked and spawned children, data loaders and shared memory."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.unit.fresh_process import in_fresh_process
from tests.unit.paging_states import STATES, round_trip
from torch_lms.swap import planning

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork", "ignore:.*max number of worker"),
]


def in_forked_child(body: Callable[[], object], meanwhile: Callable[[], object] = lambda: None) -> None:
    """Runs a body in a child of ``os.fork``, and another here meanwhile; fails with what the child raised."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            torch.set_num_threads(1)  # OpenMP's threads are not there
            body()
            message = ""
        except BaseException:
            message = traceback.format_exc()
        with os.fdopen(write, "w") as pipe:
            pipe.write(message)
        os._exit(0)
    os.close(write)
    meanwhile()
    with os.fdopen(read) as pipe:
        message = pipe.read()
    _, status = os.waitpid(child, 0)
    assert (status, message) == (0, "")


def tensors() -> list[torch.Tensor]:
    return [torch.arange(5000.0), torch.arange(100).view(10, 10), torch.ones(1 << 16)]


def check(found: list[torch.Tensor]) -> None:
    for one, other in zip(found, tensors(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("state", STATES)
def test_forked_child_reads_and_writes_its_own_copy(state: str, paged: ModuleType) -> None:
    here = tensors()
    STATES[state](here)

    def body() -> None:
        check(here)
        for tensor in here:
            tensor.add_(1)
        assert [tensor[-1].max().item() for tensor in here] == [5000, 100, 2]

    in_forked_child(body)
    check(here)
    round_trip(here)
    check(here)


def test_forked_child_keeps_what_the_parent_pages_in_and_overwrites(paged: ModuleType) -> None:
    """The parent goes on using the slabs that the child's tensors are in."""
    here = tensors()
    round_trip(here)
    go_read, go_write = os.pipe()

    def child() -> None:
        os.read(go_read, 1)
        check(here)

    def parent() -> None:
        for tensor in here:
            tensor.zero_()
        others = [torch.full((5000,), -1.0) for _ in range(200)]
        round_trip(others)
        os.write(go_write, b"x")
        assert all(tensor[0] == -1 for tensor in others)

    in_forked_child(child, meanwhile=parent)
    os.close(go_read)
    os.close(go_write)


def test_forked_child_computes_but_pages_nothing(paged: ModuleType) -> None:
    weight = torch.randn(30, 30)
    expected = (weight @ weight).tolist()
    round_trip([weight])

    def body() -> None:
        assert (weight @ weight).tolist() == expected
        for request in (paged.pageout, paged.prefetch, paged.pin):
            with pytest.raises(paged.errors.LmsError, match="forked"):
                request(weight)

    in_forked_child(body)


def test_child_forked_in_automatic_mode_reads_and_allocates(paged: ModuleType) -> None:
    paged.enable(limit=3 << 20, min_bytes=1 << 12)
    here = [torch.full((1 << 15,), float(i)) for i in range(30)]

    def body() -> None:
        assert [tensor.sum().item() / (1 << 15) for tensor in here] == list(range(30))
        more = [tensor + 1 for tensor in here[:3]]
        assert [tensor[5].item() for tensor in more] == [1, 2, 3]

    in_forked_child(body)
    assert [tensor.mean().item() for tensor in here] == list(range(30))


def test_fork_while_threads_page_leaves_both_whole(paged: ModuleType) -> None:
    """No lock of the core's may be left held in the child."""
    here = tensors()
    stop = threading.Event()

    def page() -> None:
        churn = [torch.full((3000,), float(i)) for i in range(10)]
        while not stop.is_set():
            paged.pageout(churn)
            torch._foreach_add_(churn, 1)

    thread = threading.Thread(target=page)
    thread.start()
    try:
        for _ in range(3):
            round_trip(here)
            in_forked_child(lambda: check(here))
    finally:
        stop.set()
        thread.join()
    check(here)


def test_tensors_die_in_a_forked_child_without_touching_the_parent(paged: ModuleType) -> None:
    here = tensors()
    round_trip(here)
    before = paged.stats().paged_out_bytes

    in_forked_child(here.clear)
    assert paged.stats().paged_out_bytes == before
    check(here)


def test_a_compiled_function_runs_in_a_forked_child(paged: ModuleType) -> None:
    tensor = torch.arange(100.0)
    compiled = torch.compile(lambda x: (x * 2 + 1).relu())
    expected = compiled(tensor).tolist()
    round_trip([tensor])

    def body() -> None:
        assert compiled(tensor).tolist() == expected

    in_forked_child(body)


def fork_beside_a_planner() -> list[str]:
    """A child that ends as a program does, while the parent's planner works and holds its lock."""
    process = planning.PlannerProcess()
    planning._process = process
    planning.bring_back_before_forks()
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with planning._lock:
            held.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        planning.end()  # as at exit
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    over.set()
    thread.join()
    found = [f"the child: {status}", f"the planner: {process._process.poll()}"]
    process.kill()
    return found


def test_a_forked_child_leaves_the_planner_alone() -> None:
    assert in_fresh_process(fork_beside_a_planner) == ["the child: 0", "the planner: None"]


# --- multiprocessing -------------------------------------------------------------------------------------


def _answer(given: torch.multiprocessing.Queue, answers: torch.multiprocessing.Queue) -> None:  # type: ignore[type-arg]
    tensor = given.get()
    answers.put((tensor.sum().item(), tensor.is_shared()))
    tensor.fill_(7)
    answers.put("written")
    given.get()  # the parent has read


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("state", ["plain", "paged_out", "page_out_enqueued"])
def test_tensor_sent_to_a_process_is_shared_with_it(method: str, state: str, paged: ModuleType) -> None:
    if method == "spawn" and state != "paged_out":
        pytest.skip("once is enough: a start takes seconds")
    context = torch.multiprocessing.get_context(method)
    given, answers = context.SimpleQueue(), context.SimpleQueue()
    process = context.Process(target=_answer, args=(given, answers), daemon=True)
    process.start()
    tensor = torch.arange(1000.0)
    STATES[state]([tensor])
    given.put(tensor)
    assert answers.get() == (499500.0, True)
    assert answers.get() == "written"
    assert torch.equal(tensor, torch.full((1000,), 7.0))
    given.put(None)
    process.join()
    assert process.exitcode == 0
    with pytest.raises(paged.errors.PageoutError):
        paged.pageout(tensor)


@pytest.mark.parametrize("state", STATES)
def test_shared_memory_moved_from_a_paged_out_tensor_is_seen_by_a_child(state: str, paged: ModuleType) -> None:
    tensor = torch.arange(100.0)
    alias = tensor[10:20]
    STATES[state]([tensor])
    tensor.share_memory_()
    in_forked_child(lambda: alias.fill_(3))
    assert alias.tolist() == [3] * 10
    assert round_trip([tensor]) == 1


# --- data loaders ------------------------------------------------------------------------------------------


class Rows(Dataset[torch.Tensor]):
    """Its tensor may be out when the workers are forked."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index] * 2


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("state", ["plain", "paged_out", "page_out_enqueued", "prefetch_enqueued"])
def test_data_loader_over_a_paged_out_tensor(workers: int, state: str, paged: ModuleType) -> None:
    rows = torch.arange(320.0).view(16, 20)
    STATES[state]([rows])
    batches = []
    for batch in DataLoader(Rows(rows), batch_size=4, num_workers=workers):
        paged.pageout([tensor for tensor in [batch.clone(), rows] if not tensor.is_shared()])
        batches.append(batch + 0)
    assert torch.equal(torch.cat(batches), torch.arange(320.0).view(16, 20) * 2)


def test_batches_of_workers_are_refused_and_their_copies_go_out(paged: ModuleType) -> None:
    rows = torch.arange(64.0).view(8, 8)
    for (batch,) in DataLoader(TensorDataset(rows), batch_size=4, num_workers=1):
        assert batch.is_shared()
        with pytest.raises(paged.errors.PageoutError, match="shared"):
            paged.pageout(batch)
        copy = batch.clone()
        assert round_trip([copy]) == 0
        assert torch.equal(copy, batch)


def test_data_loader_in_automatic_mode(paged: ModuleType) -> None:
    rows = torch.arange(64.0 * 4096).view(64, 4096)
    paged.enable(limit=8 << 20, min_bytes=1 << 12)
    results = [batch.sum(1).clone() for (batch,) in DataLoader(TensorDataset(rows), batch_size=8, num_workers=2)]
    paged.disable()
    assert torch.equal(torch.cat(results), rows.sum(1))
