"""The scope of manual mode: opened, left, left early, entered twice, forgotten."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

import torch_lms
from tests.unit.error_messages import raises_saying
from tests.unit.fresh_process import run_python
from tests.unit.markers import counts_exactly
from torch_lms.errors import EnvError
from torch_lms.swap import SwapEnv, state


def tensor_and_copy() -> tuple[torch.Tensor, torch.Tensor]:
    tensor = torch.rand(1000)
    return tensor, tensor.clone()


@counts_exactly
def test_an_environment_pages_in_everything_on_exit(paged: ModuleType) -> None:
    tensor, copy = tensor_and_copy()
    with SwapEnv() as env:
        assert env.pageout(tensor) == 1
        env.wait()
        assert state(tensor) == "paged_out"
    assert state(tensor) == "resident"
    assert torch.equal(tensor, copy)
    assert paged.stats().paged_out_storages == 0


@counts_exactly
def test_an_environment_does_what_the_functions_do(paged: ModuleType) -> None:
    tensors = [torch.rand(1000) for _ in range(3)]
    with SwapEnv() as env:
        assert env.pageout(tensors[0], tensors[1:]) == 3
        env.wait()
        assert env.prefetch(tensors[:2], tensors[2]) == 3
        env.wait()
        assert [state(tensor) for tensor in tensors] == ["resident"] * 3


@counts_exactly
def test_exit_pages_in_what_the_functions_paged_out(paged: ModuleType) -> None:
    tensor, _ = tensor_and_copy()
    with SwapEnv():
        paged.pageout(tensor)
        paged.wait()
        assert state(tensor) == "paged_out"
    assert state(tensor) == "resident"


def test_exit_waits_for_what_is_under_way() -> None:
    tensor = torch.rand(4 << 20)
    copy = tensor.clone()
    with SwapEnv() as env:
        env.pageout(tensor)
    assert state(tensor) == "resident"
    assert torch.equal(tensor, copy)


def test_entering_gives_the_environment_itself() -> None:
    env = SwapEnv()
    with env as entered:
        assert entered is env


def test_entering_an_open_environment_is_refused_and_leaves_it_open() -> None:
    tensor, copy = tensor_and_copy()
    with SwapEnv() as env:
        with raises_saying(EnvError, found="an open one", do="leave it before entering it again"), env:
            pytest.fail("entered twice")
        env.pageout(tensor)
        env.wait()
    assert torch.equal(tensor, copy)


def test_an_environment_can_be_entered_again_after_it_was_left() -> None:
    tensor, copy = tensor_and_copy()
    env = SwapEnv()
    for _ in range(3):
        with env:
            env.pageout(tensor)
        assert state(tensor) == "resident"
    assert torch.equal(tensor, copy)


def test_closing_twice_has_no_effect() -> None:
    with SwapEnv() as env:
        env.close()
        env.close()
    env.close()


def test_closing_before_opening_has_no_effect() -> None:
    env = SwapEnv()
    env.close()
    with env:
        assert env.pageout() == 0


CALLS: dict[str, Callable[[SwapEnv], object]] = {
    "pageout": lambda env: env.pageout(torch.rand(3)),
    "prefetch": lambda env: env.prefetch(torch.rand(3)),
    "wait": lambda env: env.wait(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("opened_before", [False, True])
def test_a_closed_environment_refuses_to_be_used(call: str, opened_before: bool) -> None:
    env = SwapEnv()
    if opened_before:
        with env:
            pass
    with raises_saying(EnvError, found="a closed one", do="use it in a with statement"):
        CALLS[call](env)


@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_an_exception_inside_closes_the_environment_and_passes(kind: type[BaseException]) -> None:
    tensor, copy = tensor_and_copy()
    env = SwapEnv()

    def page_and_raise() -> None:
        with env:
            env.pageout(tensor)
            raise kind

    with pytest.raises(kind):
        page_and_raise()
    assert state(tensor) == "resident"
    assert torch.equal(tensor, copy)
    with pytest.raises(EnvError):
        env.pageout(tensor)


@counts_exactly
def test_an_inner_environment_pages_in_everything_and_leaves_the_outer_one_open(paged: ModuleType) -> None:
    tensor, copy = tensor_and_copy()
    with SwapEnv() as outer:
        outer.pageout(tensor)
        with SwapEnv() as inner:
            inner.pageout(tensor)
            inner.wait()
            assert state(tensor) == "paged_out"
        assert state(tensor) == "resident"
        outer.pageout(tensor)
        outer.wait()
        assert state(tensor) == "paged_out"
    assert state(tensor) == "resident"
    assert torch.equal(tensor, copy)


@counts_exactly
def test_a_forgotten_environment_leaves_what_is_out_usable(paged: ModuleType) -> None:
    tensor, copy = tensor_and_copy()
    env = SwapEnv().__enter__()
    env.pageout(tensor)
    env.wait()
    del env
    gc.collect()
    assert state(tensor) == "paged_out"
    assert torch.equal(tensor, copy)
    with SwapEnv() as env:
        env.pageout(tensor)
    assert torch.equal(tensor, copy)


def test_an_environment_inside_of_automatic_mode_leaves_that_on() -> None:
    tensor, copy = tensor_and_copy()
    torch_lms.enable({"cpu": "1GiB"})
    with SwapEnv() as env:
        env.pageout(tensor)
    assert torch_lms.swap.is_enabled()
    assert torch.equal(tensor, copy)


# --- the end of the interpreter ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def endings() -> dict[str, tuple[int, str]]:
    """How each program of ends_of_process.py ended: its exit status and what it printed."""
    ended = run_python("-m", "tests.unit.ends_of_process")
    assert ended.returncode == 0, ended.stderr
    return {name: (status, output) for name, (status, output) in json.loads(ended.stdout).items()}


@pytest.mark.parametrize(
    "program",
    [
        "page_outs_under_way",
        "page_ins_under_way",
        "page_ins_on_hold",
        "automatic_mode",
        "ops_at_exit",
        "an_op_that_never_ends",
    ],
)
def test_a_program_that_ends_while_paging_ends_in_silence(program: str, endings: dict[str, tuple[int, str]]) -> None:
    status, output = endings[program]
    assert status == 0
    # Triton's bindings may have words of their own at this moment.
    assert [line for line in output.splitlines() if "torch_lms" in line or "Error" in line or "Warning" in line] == []


def test_a_program_that_ends_before_it_learns_of_a_failed_page_out_ends(endings: dict[str, tuple[int, str]]) -> None:
    assert endings["a_page_out_that_fails"][0] == 0
