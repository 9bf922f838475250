"""Ops on tensors that are not plain, functions that call Python while they hold addresses, one tensor given twice."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

KIB = 1 << 10
LIMIT_BYTES = 1 << 20


class Wrapped(torch.Tensor):
    """Holds another tensor, and hands each op on to it."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:  # noqa: ANN001
        made: Wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(Wrapped, lambda one: one.inner, (args, kwargs or {}))
        return pytree.tree_map_only(torch.Tensor, Wrapped, func(*args, **kwargs))


def test_what_wrappers_hold_goes_out(paged: ModuleType) -> None:
    paged.enable(limit={"cpu": LIMIT_BYTES}, min_bytes=4 * KIB)
    kept = [Wrapped(torch.full((128, 128), 1.0))]
    for _ in range(40):
        kept.append(kept[-1] * 2 % 1001)
    assert paged.stats().pageouts > 20
    assert paged.stats().peak_allocated_bytes <= LIMIT_BYTES
    for number, one in enumerate(kept):
        assert torch.equal(one.inner, torch.full((128, 128), float(pow(2, number) % 1001) if number else 1.0)), number


@pytest.mark.skipif(not hasattr(torch, "jagged"), reason="this PyTorch has no jagged tensors")
def test_jagged_tensors_are_made_and_go_out(paged: ModuleType) -> None:
    paged.enable(limit={"cpu": LIMIT_BYTES}, min_bytes=4 * KIB)
    parts = [torch.full((rows, 64), float(rows)) for rows in (300, 200, 100)]
    kept = [torch.nested.nested_tensor(parts, layout=torch.jagged)]
    for _ in range(20):
        kept.append(kept[-1] + 1)
    for number, one in enumerate(kept):
        assert [part[0, 0].item() - number for part in one.unbind()] == [300, 200, 100]


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no mkldnn")
def test_dense_inputs_beside_an_mkldnn_tensor_stay_while_the_op_runs(paged: ModuleType) -> None:
    weight, bias = torch.rand(64, 64, 3, 3), torch.rand(64)
    image = torch.rand(4, 64, 16, 16).to_mkldnn()
    expected = torch.nn.functional.conv2d(image, weight, bias).to_dense()
    keeper = torch.zeros(4096)  # ops are observed while something is out
    paged.pageout(keeper)
    paged.wait()
    stop = threading.Event()

    def move() -> None:
        while not stop.is_set():
            paged.pageout(weight)
            paged.wait()
            paged.prefetch(weight)

    mover = threading.Thread(target=move)
    mover.start()
    try:
        for _ in range(60):
            assert torch.equal(torch.nn.functional.conv2d(image, weight, bias).to_dense(), expected)
    finally:
        stop.set()
        mover.join()


CALLS: dict[str, Callable[[torch.Tensor, Callable[..., float]], Any]] = {
    "apply_": lambda tensor, call: tensor.apply_(call),
    "map_": lambda tensor, call: tensor.map_(torch.zeros_like(tensor), call),
    "map2_": lambda tensor, call: tensor.map2_(torch.zeros_like(tensor), torch.zeros_like(tensor), call),
}


@pytest.mark.parametrize("name", sorted(CALLS))
def test_what_calls_python_for_each_element_loses_nothing(name: str, paged: ModuleType) -> None:
    paged.enable(limit={"cpu": LIMIT_BYTES}, min_bytes=4 * KIB)
    others = [torch.full((64 * KIB,), 1.0) for _ in range(6)]  # 1.5 of the limit
    tensor, calls = torch.zeros(16 * KIB), 0

    def call(value: float, *_: float) -> float:
        nonlocal calls
        calls += 1
        if calls % 4096 == 100:
            for other in others:
                other.add_(1)
        return value + 1

    CALLS[name](tensor, call)
    assert torch.equal(tensor, torch.ones(16 * KIB))
    assert all(torch.equal(other, torch.full_like(other, 5.0)) for other in others)


@pytest.mark.parametrize("name", sorted(CALLS))
def test_what_it_calls_cannot_page_the_tensor_out_by_hand(name: str, paged: ModuleType) -> None:
    tensor, went = torch.zeros(4 * KIB), []

    def call(value: float, *_: float) -> float:
        if not went:
            went.append(paged.pageout(tensor))
        return value + 1

    CALLS[name](tensor, call)
    assert went == [0]
    assert torch.equal(tensor, torch.ones(4 * KIB))
    assert paged.pageout(tensor) == 1  # afterwards it may


def test_an_op_that_is_given_one_tensor_twice_makes_the_limit_give_way_once(paged: ModuleType) -> None:
    tensor = torch.randn(256, 256)
    expected = torch.cdist(tensor, tensor)
    paged.enable(limit={"cpu": int(3.2 * 256 * KIB)}, min_bytes=4 * KIB, swap=False, recompute=False)
    tensor = tensor + 0
    exceeded = []
    for _ in range(4):
        paged.stats(reset=True)
        assert torch.equal(torch.cdist(tensor, tensor), expected)
        exceeded.append(paged.stats().limit_exceeded)
    assert exceeded[1:] == [0, 0, 0]
