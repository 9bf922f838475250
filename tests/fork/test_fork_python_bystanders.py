"""torch_lms on the fork's own runtime, called where PyTorch or Python comes in between.

Runs as ``test_fork_python_layer.py`` does. See Note [Operators that are no ops] in ``python/torch_lms/_fork.py``.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from typing import Any

import pytest

from tests.fork.python_layer import (
    DEVICES,
    check_message,
    device,
    filled,
    is_filled,
    paged_out,
    run_python,
    settled,
    swap,
    torch,
    torch_lms,
)
from torch_lms import errors

__all__ = ["device", "settled"]  # fixtures


def test_a_trace_holds_no_request(device: str) -> None:
    def traced(tensor: torch.Tensor) -> torch.Tensor:
        product = tensor * 2
        torch_lms.pageout(product)
        torch_lms.pageout(untyped)
        torch_lms.wait()
        assert swap.state(product) == "paged_out"
        torch_lms.prefetch(product)
        return product + 1

    untyped = filled(device, 1).storage()._storage
    function = torch.jit.trace(traced, torch.ones(9, device=device), check_trace=False)
    assert "swap" not in str(function.graph)
    assert torch.equal(function(torch.zeros(9, device=device)).cpu(), torch.ones(9))


def test_a_mode_of_dispatch_may_page_what_it_sees(device: str) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Paging(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            result = function(*args, **(kwargs or {}))
            torch_lms.pageout(result)
            return result

    first = filled(device)
    storage = first.storage()._storage
    with Paging():
        second = first + 1
        torch_lms.pageout(storage)
        torch_lms.wait()
        torch_lms.stats()
    assert seen == ["aten.add.Tensor"]
    assert swap.state(second) == swap.state(first) == "paged_out"


def test_a_fake_mode_does_not_reach_storages(device: str) -> None:
    from torch._subclasses import FakeTensorMode

    tensor = filled(device)
    storage = tensor.storage()._storage
    with FakeTensorMode():
        torch_lms.pageout(storage)
        torch_lms.wait()
        assert swap.state(storage) == "paged_out"
    assert is_filled(tensor)


def test_a_mode_of_functions_may_page_what_it_sees(device: str) -> None:
    from torch.overrides import TorchFunctionMode

    class Paging(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                torch_lms.pageout(result)
            return result

    first = filled(device)
    storage = first.storage()._storage
    with Paging():
        second = first + 1
        torch_lms.pageout(storage)  # makes a tensor of it
    torch_lms.wait()
    assert swap.state(second) == swap.state(first) == "paged_out"


def test_a_class_of_tensors_may_page_what_it_sees(device: str) -> None:
    class Paging(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = super().__torch_function__(function, types, args, kwargs or {})
            torch_lms.pageout([each for each in args if isinstance(each, cls)])
            return result

    tensor = filled(device).as_subclass(Paging)
    paged_out(tensor)
    doubled = tensor * 2
    assert type(doubled) is Paging
    torch_lms.wait()
    assert swap.state(tensor) == "paged_out"


def test_a_finalizer_may_page_in_the_middle_of_a_request(device: str) -> None:
    from torch_lms import _fork

    tensor = filled(device)

    class Finalized:
        def __del__(self) -> None:
            torch_lms.pageout(tensor)

    with _fork._open_environment():
        cycle: list[Any] = [Finalized()]
        cycle.append(cycle)
        del cycle
        gc.collect()
    torch_lms.wait()
    assert swap.state(tensor) == "paged_out"


def test_a_handler_of_a_signal_may_page_in_the_middle_of_a_request(device: str) -> None:
    from torch_lms import _fork

    tensor = filled(device)
    before = signal.signal(signal.SIGUSR1, lambda *_: torch_lms.pageout(tensor))
    try:
        with _fork._open_environment():
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    torch_lms.wait()
    assert swap.state(tensor) == "paged_out"


def test_an_environment_that_the_program_opens_meanwhile_is_the_programs(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch_lms import _fork

    call = _fork._call

    def slow_call(operator: str, *arguments: Any) -> Any:
        if operator == "create_env":
            torch.cuda.create_swap_env()
        return call(operator, *arguments)

    monkeypatch.setattr(_fork, "_call", slow_call)
    with torch_lms.SwapEnv() as env:
        assert env.pageout(filled(device)) == 1
    assert torch.cuda.swap.is_swap_env_open()


def test_a_tensor_without_storage_has_no_state_whatever_failed_before(device: str) -> None:
    torch.cuda.create_swap_env(1 << 20)
    torch.ones(4 << 20, device=device).pageout_manual()  # dies: nothing fails
    large = torch.ones(4 << 20, device=device)
    large.pageout_manual()
    with pytest.raises(RuntimeError, match="host_limit="):
        torch.cuda.before_prefetch_wait_all()
    with pytest.raises(errors.PageoutError) as caught:
        swap.state(torch.eye(3).to_sparse())
    check_message(caught.value, "sparse", "values()")
    torch.cuda.close_swap_env()
    swap.SwapEnv(host_limit="50%")


@pytest.mark.skipif("cpu" not in DEVICES, reason="CUDA does not work in a forked child anyway")
def test_a_child_forked_while_a_thread_asks_can_page() -> None:
    from torch_lms import _fork

    holds, forks = threading.Event(), threading.Event()

    def ask() -> None:
        with _fork._lock:
            holds.set()
            forks.wait(1)

    thread = threading.Thread(target=ask)
    thread.start()
    holds.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        free = _fork._lock.acquire(blocking=False)
        tensor = filled("cpu")
        torch_lms.pageout(tensor)
        torch_lms.wait()
        os._exit(0 if free and swap.state(tensor) == "paged_out" and is_filled(tensor) else 3)
    forks.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif("cpu" not in DEVICES, reason="the CPU's backend has files, which processes share")
def test_a_child_keeps_what_was_out_when_it_was_forked() -> None:
    program = (
        "import os, torch, torch_lms\n"
        "first, second = torch.ones(9), torch.zeros(9)\n"
        "torch_lms.pageout(first); torch_lms.wait()\n"
        "ready, go = os.pipe()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os.read(ready, 1)\n"
        "    os._exit(0 if torch.equal(first, torch.ones(9)) else 4)\n"
        "first.add_(0)\n"
        "torch_lms.pageout(second); torch_lms.wait()\n"  # in the same place of the file
        "os.write(go, b'!')\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    ended = run_python(program)
    assert ended.returncode == 0, ended.stderr
