"""Tensors that cannot be paged out, and calls that cannot be followed: refused in words, with nothing changed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_lms
from tests.unit.error_messages import raises_saying
from tests.unit.markers import counts_exactly
from torch_lms._core import core
from torch_lms.errors import LmsError, PageoutError
from torch_lms.swap import SwapEnv, state

COPY = "page out a copy of it (tensor.clone())"
PARTS = "page out the tensors it is made of"


class Wrapper(torch.Tensor):
    """A tensor around another one, with no memory of its own."""

    @staticmethod
    def __new__(cls: type[Wrapper], inner: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"no op is expected, {op} came")


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(100)


def saved_and_mapped(path: Path) -> torch.Tensor:
    torch.save(torch.ones(100), path / "saved.pt")
    return torch.load(path / "saved.pt", mmap=True)


def mapped_from_file(path: Path, *, shared: bool) -> torch.Tensor:
    (path / "mapped").write_bytes(bytes(4096))
    return torch.from_file(str(path / "mapped"), shared=shared, size=1024)


FOREIGN: dict[str, Callable[[Path], torch.Tensor]] = {
    "numpy array": lambda path: torch.from_numpy(np.ones(100)),
    "buffer": lambda path: torch.frombuffer(bytearray(400), dtype=torch.float32),
    "shared memory": lambda path: torch.ones(100).share_memory_(),
    "file, shared": lambda path: mapped_from_file(path, shared=True),
    "file, private": lambda path: mapped_from_file(path, shared=False),
    "mapped checkpoint": saved_and_mapped,
    "meta": lambda path: torch.ones(100, device="meta"),
    "fake": lambda path: fake(),
    "wrapper": lambda path: Wrapper(torch.ones(100)),
    "copy on write": lambda path: torch._lazy_clone(torch.ones(100)),
}
SPARSE: dict[str, Callable[[], torch.Tensor]] = {
    "coo": lambda: torch.eye(10).to_sparse(),
    "csr": lambda: torch.eye(10).to_sparse_csr(),
    "bsc": lambda: torch.eye(10).to_sparse_bsc((2, 2)),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_memory_that_is_not_pytorchs_own_is_refused(kind: str, tmp_path: Path) -> None:
    tensor = FOREIGN[kind](tmp_path)
    with raises_saying(PageoutError, found=f"{tensor.untyped_storage().nbytes()} bytes on", do=COPY):
        torch_lms.pageout(tensor)
    assert state(tensor) == "resident"
    assert torch_lms.prefetch(tensor) == 0
    torch_lms.wait()


@pytest.mark.parametrize("kind", [kind for kind in FOREIGN if kind not in ("meta", "fake", "wrapper")])
def test_a_copy_of_memory_that_is_not_pytorchs_own_goes_out(kind: str, tmp_path: Path) -> None:
    tensor = FOREIGN[kind](tmp_path)
    before = tensor.tolist()
    copy = tensor.clone()
    torch_lms.pageout(copy)
    torch_lms.wait()
    assert copy.tolist() == tensor.tolist() == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned host memory needs a CUDA device")
def test_pinned_host_memory_is_refused() -> None:
    with raises_saying(PageoutError, found="400 bytes on cpu", do=COPY):
        torch_lms.pageout(torch.ones(100).pin_memory())


@pytest.mark.parametrize("kind", SPARSE)
def test_a_sparse_tensor_is_refused_and_its_parts_go_out(kind: str) -> None:
    tensor = SPARSE[kind]()
    dense = tensor.to_dense()
    for call in (torch_lms.pageout, torch_lms.prefetch, torch_lms.pin, state):
        with raises_saying(PageoutError, found="layout", do=PARTS):
            call(tensor)  # type: ignore[operator]
    torch_lms.pageout(tensor.values())
    torch_lms.wait()
    assert torch.equal(tensor.to_dense(), dense)


def test_a_jagged_tensor_is_refused_and_its_values_go_out() -> None:
    tensor = torch.nested.nested_tensor([torch.ones(300), torch.rand(500)], layout=torch.jagged)
    before = tensor.values().tolist()
    for call in (torch_lms.pageout, torch_lms.prefetch, torch_lms.pin, state):
        with raises_saying(PageoutError, found="layout Jagged", do="for a nested one: tensor.values()"):
            call(tensor)  # type: ignore[operator]
    assert torch_lms.pageout(tensor.values()) == 1
    torch_lms.wait()
    assert tensor.values().tolist() == before


def test_a_tensor_of_vmap_is_refused() -> None:
    def page_out(row: torch.Tensor) -> torch.Tensor:
        torch_lms.pageout(row)
        return row

    with raises_saying(PageoutError, found="wrapper", do=PARTS):
        torch.vmap(page_out)(torch.ones(3, 100))


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32])
def test_a_quantized_tensor_keeps_every_bit(dtype: torch.dtype) -> None:
    tensor = torch.quantize_per_tensor(torch.arange(1000.0), 0.1, 3, dtype)
    before = tensor.int_repr().clone()
    torch_lms.pageout(tensor)
    torch_lms.wait()
    assert torch.equal(tensor.int_repr(), before)


@counts_exactly
def test_what_is_named_before_the_refused_one_goes_out(paged: ModuleType) -> None:
    first, last = torch.ones(100), torch.ones(100)
    with pytest.raises(PageoutError):
        paged.pageout(first, torch.from_numpy(np.ones(3)), last)
    paged.wait()
    assert [state(first), state(last)] == ["paged_out", "resident"]


@counts_exactly
def test_what_is_named_before_a_sparse_one_goes_out(paged: ModuleType) -> None:
    first = torch.ones(100)
    with pytest.raises(PageoutError):
        paged.pageout(first, SPARSE["coo"]())
    paged.wait()
    assert state(first) == "paged_out"


def test_an_environment_refuses_the_same_and_stays_open() -> None:
    tensor = torch.ones(100)
    with SwapEnv() as env:
        with pytest.raises(PageoutError):
            env.pageout(torch.ones(3, device="meta"))
        env.pageout(tensor)
    assert torch.equal(tensor, torch.ones(100))


def test_pin_of_what_never_moves_has_no_effect() -> None:
    tensor = torch.from_numpy(np.ones(100))
    torch_lms.pin(tensor)
    assert state(tensor) == "resident"


def test_unpin_undoes_pin_of_what_never_moves() -> None:
    tensor = torch.from_numpy(np.ones(100))
    torch_lms.pin(tensor)
    torch_lms.swap.unpin(tensor)


# --- wrong types ----------------------------------------------------------------------------------------------

CALLS: dict[str, Callable[[Any], object]] = {
    "pageout": torch_lms.pageout,
    "prefetch": torch_lms.prefetch,
    "pin": torch_lms.pin,
    "unpin": torch_lms.swap.unpin,
    "state": state,
}
WRONG: dict[str, Any] = {"None": None, "int": 3, "text": "abc", "array": np.ones(3), "list of lists": [[torch.ones(3)]]}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_tensor_is_a_type_error(call: str, wrong: str) -> None:
    with pytest.raises(TypeError):
        CALLS[call](WRONG[wrong])


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_tensor_is_refused_in_three_parts(wrong: str) -> None:
    with raises_saying(TypeError, do="pass"):
        torch_lms.pageout(WRONG[wrong])


@counts_exactly
def test_a_wrong_type_among_tensors_moves_nothing(paged: ModuleType) -> None:
    tensor = torch.ones(100)
    with pytest.raises(TypeError):
        paged.pageout(tensor, [tensor, None])
    paged.wait()
    assert state(tensor) == "resident"


# --- a forked child ---------------------------------------------------------------------------------------------


IN_A_CHILD: dict[str, Callable[[torch.Tensor], object]] = {
    "pageout": torch_lms.pageout,
    "prefetch": torch_lms.prefetch,
    "wait": lambda tensor: torch_lms.wait(),
    "pin": torch_lms.pin,
    "enable": lambda tensor: torch_lms.enable({"cpu": "1GiB"}),
    "disable": lambda tensor: core.disable(),
    "SwapEnv": lambda tensor: SwapEnv(),
    "state": state,
    "stats": lambda tensor: torch_lms.stats(),
    "memory_summary": lambda tensor: torch_lms.memory_summary("cpu"),
}


def refused(call: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> str:
    """Nothing if a call is refused as it should be, or what happened instead."""
    try:
        with raises_saying(LmsError, found="a child forked from it", do="start it with 'spawn'"):
            call(tensor)
    except BaseException as error:
        return repr(error)
    return ""


def test_a_forked_child_is_refused_everything_but_use() -> None:
    tensor = torch.ones(100)
    torch_lms.pageout(tensor)
    torch_lms.wait()
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        answers = {name: refused(call, tensor) for name, call in IN_A_CHILD.items()}
        os.write(there, json.dumps([answers, tensor.tolist()]).encode())
        os._exit(0)
    os.close(there)
    with open(here, "rb") as pipe:
        heard = json.loads(pipe.read())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert heard == [dict.fromkeys(IN_A_CHILD, ""), [1.0] * 100]
    assert torch.equal(tensor, torch.ones(100))
