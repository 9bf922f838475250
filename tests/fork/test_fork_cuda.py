"""The fork's CUDA wheel on a GPU: streams, threads, exceptions, and training that is bit-equal.

python -m pytest --noconftest -o pythonpath= tests/fork/test_fork_cuda.py
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or not hasattr(torch.Tensor, "pageout_manual"):
    pytest.skip("needs a PyTorch with the fork's patches, and a GPU", allow_module_level=True)

COUNT = 1 << 20


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    torch.cuda.create_swap_env()
    torch.cuda.prefetch_all()
    yield
    if torch.cuda.swap.is_swap_env_open():
        torch.cuda.close_swap_env()


def filled(seed: int = 0, count: int = COUNT) -> Any:
    return torch.randint(0, 2**30, (count,), dtype=torch.int32, generator=torch.Generator().manual_seed(seed)).cuda()


def out(*tensors: Any) -> None:
    for tensor in tensors:
        tensor.pageout_manual()
    torch.cuda.before_prefetch_wait_all()
    assert [torch.cuda.swap.state(tensor) for tensor in tensors] == ["paged_out"] * len(tensors)


def test_a_pageout_gives_the_devices_memory_back() -> None:
    tensor = filled()
    before = torch.cuda.memory_allocated()
    out(tensor)
    assert torch.cuda.memory_allocated() == before - 4 * COUNT
    assert torch.equal(tensor, filled())


def test_work_that_is_under_way_on_another_stream_is_waited_for() -> None:
    stream = torch.cuda.Stream()
    tensor = torch.zeros(COUNT, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        tensor.add_(3)
    tensor.pageout_manual()
    torch.cuda.before_prefetch_wait_all()
    assert torch.equal(tensor.cpu(), torch.full((COUNT,), 3.0))


@pytest.mark.parametrize("prefetched", [False, True])
def test_a_kernel_on_any_stream_comes_after_the_pagein(prefetched: bool) -> None:
    streams = [torch.cuda.Stream() for _ in range(4)]
    for round_ in range(10):
        tensors = [filled(seed) for seed in range(4)]
        out(*tensors)
        if prefetched:
            for tensor in tensors:
                tensor.need_prefetch()
        sums = []
        for stream, tensor in zip(streams, tensors, strict=True):
            with torch.cuda.stream(stream):
                sums.append(tensor.sum())
        torch.cuda.synchronize()
        expected = [filled(seed).sum().item() for seed in range(4)]
        assert [one.item() for one in sums] == expected, round_


def test_threads_read_while_others_page() -> None:
    shared = [filled(seed) for seed in range(4)]
    expected = [int(filled(seed).sum()) for seed in range(4)]
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for index in range(60):
                    tensor = shared[(seed + index) % 4]
                    assert int(tensor.sum()) == expected[(seed + index) % 4]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    own = [filled(9), filled(10)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        out(*own)  # nobody else uses these; the shared ones stay where an address may be in use
        assert torch.equal(own[0], filled(9))
        assert torch.equal(own[1], filled(10))
    assert failures == []


def test_threads_that_read_what_is_out_find_it() -> None:
    for round_ in range(20):
        tensor = filled(round_)
        out(tensor)
        barrier = threading.Barrier(6)
        sums: list[int] = []

        def work(tensor: Any = tensor, barrier: Any = barrier, sums: Any = sums) -> None:
            with torch.cuda.stream(torch.cuda.Stream()):
                barrier.wait()
                sums.append(int(tensor.sum()))

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sums == [int(filled(round_).sum())] * 6


def test_what_finds_no_room_raises_and_comes_back_later() -> None:
    tensor = filled(count=16 * COUNT)  # a segment of its own
    out(tensor)
    torch.cuda.empty_cache()
    memory = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / memory + 1e-7)
    try:
        with pytest.raises(RuntimeError, match="out of memory"):
            tensor.add(1)
        assert torch.cuda.swap.state(tensor) == "paged_out"
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.equal(tensor, filled(count=16 * COUNT))


def test_an_exception_in_a_step_leaves_everything_usable() -> None:
    tensor = filled()
    out(tensor)
    with pytest.raises(RuntimeError, match="shapes"):
        tensor.view(2, -1).mm(torch.ones(3, 3, device="cuda", dtype=torch.int32))
    assert torch.equal(tensor, filled())


def test_bytes_survive_every_way_out_of_the_device() -> None:
    tensor = filled()
    ways = {
        "numpy": lambda t: torch.from_numpy(t.cpu().numpy().copy()),
        "pickle": lambda t: pickle.loads(pickle.dumps(t)),
        "dlpack": lambda t: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(t)).clone(),
        "interface": lambda t: t if t.__cuda_array_interface__["data"][0] == t.data_ptr() else None,
        "another dtype": lambda t: t.view(torch.uint8).clone().view(torch.int32),
        "half a view": lambda t: torch.cat([t[: COUNT // 2], t[COUNT // 2 :]]),
        "share of a storage": lambda t: torch.empty(0, dtype=t.dtype, device="cuda").set_(t),
    }
    for name, way in ways.items():
        moved = tensor.clone()
        out(moved)
        assert torch.equal(way(moved).cpu(), tensor.cpu()), name


def test_resize_keeps_what_was_there() -> None:
    tensor = filled()
    out(tensor)
    tensor.resize_(4 * COUNT)
    assert torch.equal(tensor[:COUNT], filled())


def test_double_backward_through_what_is_out() -> None:
    def second(page: bool) -> Any:
        torch.manual_seed(0)
        weight = torch.randn(256, 256, device="cuda", requires_grad=True)
        hidden = (weight @ weight).tanh()
        (first,) = torch.autograd.grad(hidden.square().sum(), weight, create_graph=True)
        if page:
            out(hidden, first)
        (found,) = torch.autograd.grad(first.square().sum(), weight)
        return found

    assert torch.equal(second(False), second(True))


def test_nothing_moves_while_a_graph_is_captured() -> None:
    tensor, static = filled(), torch.zeros(COUNT, device="cuda")
    out(tensor)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match=r"captur|graph"), torch.cuda.graph(graph):
        tensor.add(1)
    torch.cuda.synchronize()
    assert torch.equal(tensor, filled())
    again = torch.cuda.CUDAGraph()
    with torch.cuda.graph(again):
        static.add_(1)
    again.replay()
    assert static.sum().item() == COUNT


def test_rounds_of_paging_keep_every_bit() -> None:
    tensors = [filled(seed, count) for seed, count in enumerate((1, 7, 255, 4096, 12_345, COUNT))]
    for _ in range(20):
        out(*tensors)
        torch.cuda.prefetch_init()
        for tensor in tensors:
            tensor.need_prefech()
        torch.cuda.prefetch_all()
        for seed, tensor in enumerate(tensors):
            assert torch.equal(tensor, filled(seed, tensor.numel()))
