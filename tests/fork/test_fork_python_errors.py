"""torch_lms on the fork's own runtime: what it refuses, in which words, and other processes.

Runs as ``test_fork_python_layer.py`` does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fork.python_layer import (
    DEVICES,
    NBYTES,
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


# --- errors ---------------------------------------------------------------------------------------------


REFUSED: dict[str, Callable[[], torch.Tensor]] = {
    "foreign memory": lambda: torch.frombuffer(bytearray(NBYTES), dtype=torch.uint8),
    "meta": lambda: torch.empty(4, device="meta"),
    "sparse": lambda: torch.eye(4).to_sparse(),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_paged_out_is_refused_and_what_stood_before_it_goes(device: str, kind: str) -> None:
    tensor, wrong = filled(device), REFUSED[kind]()
    with pytest.raises(errors.PageoutError) as caught:
        torch_lms.pageout(tensor, wrong)
    check_message(caught.value)
    torch_lms.wait()
    assert swap.state(tensor) == "paged_out"
    assert is_filled(tensor)


def test_a_full_host_is_an_error_at_the_wait_and_the_storage_stays(device: str) -> None:
    tensor = torch.ones(4 << 20, device=device)
    env = torch_lms.SwapEnv(host_limit="2MiB")
    try:
        torch_lms.pageout(tensor)
        with env, pytest.raises(errors.HostPoolFullError, match="host_limit="):
            env.wait()
        assert swap.state(tensor) == "resident"
    finally:
        swap.SwapEnv(host_limit="50%")
    paged_out(tensor)
    assert torch.equal(tensor.cpu(), torch.ones(4 << 20))


def test_limits_are_understood_as_elsewhere() -> None:
    with pytest.raises(errors.LimitError):
        torch_lms.SwapEnv(host_limit="much")
    swap.SwapEnv(host_limit="50%")
    with torch_lms.SwapEnv() as env:
        env.pageout(filled(DEVICES[0]))
        limit = torch_lms.stats().host_limit_bytes
        assert abs(limit - torch.ops.storage_swap.host_memory_bytes() / 2) <= 1


def test_a_spill_directory_cannot_be_chosen(tmp_path: Path) -> None:
    with pytest.raises(errors.LmsError) as caught:
        torch_lms.SwapEnv(spill_dir=tmp_path)
    check_message(caught.value, str(tmp_path), "TMPDIR")


@pytest.mark.skipif("cpu" not in DEVICES, reason="the CPU's backend has files")
def test_a_missing_directory_for_spill_files_is_a_spill_error() -> None:
    program = (
        "import torch, torch_lms\n"
        "tensor = torch.ones(9)\n"
        "torch_lms.pageout(tensor)\n"
        "try:\n    torch_lms.wait()\n"
        "except torch_lms.errors.SpillError as error:\n    print('spill', error)\n"
        "assert torch.equal(tensor, torch.ones(9))\n"
    )
    ended = run_python(program, TMPDIR="/nowhere/at/all")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("spill expected ")


def test_plans_are_refused_in_words() -> None:
    with pytest.raises(errors.LmsError) as caught:
        torch_lms.enable("1GiB", plan="plan.json")
    check_message(caught.value, "plans", torch.__version__, "leave plan= out")
    torch_lms.disable()  # nothing to end
    assert not swap.is_enabled()


def test_a_limit_of_main_memory_is_refused_in_words() -> None:
    program = (
        "import torch_lms, torch_lms.errors as errors\n"
        "try: torch_lms.enable({'cpu': '1GiB'})\n"
        "except errors.LimitError as error: print(error)\n"
        "print(torch_lms.swap.is_enabled())"
    )
    ended = run_python(program, TORCH_SWAP_CPU="0")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("expected a "), ended.stdout
    assert ended.stdout.endswith("False\n")


@pytest.mark.parametrize(
    ("call", "do"),
    [
        (swap.count_cpu_allocations, "stock PyTorch"),
        (lambda: torch_lms.chunked, "stock PyTorch"),
        (lambda: torch_lms.fit, "stock PyTorch"),
    ],
)
def test_what_the_fork_does_not_have_is_refused_in_words(call: Callable[[], object], do: str) -> None:
    with pytest.raises(errors.LmsError) as caught:
        call()
    check_message(caught.value, "the extension of torch_lms", do)


def test_chaos_mode_is_refused_in_words() -> None:
    ended = run_python("import torch_lms", TORCH_LMS_CHAOS="1")
    assert ended.returncode == 1
    assert "chaos mode" in ended.stderr
    assert "unset TORCH_LMS_CHAOS" in ended.stderr


def test_without_a_device_the_error_says_what_to_do() -> None:
    if torch.version.cuda is not None:
        pytest.skip("needs a build without CUDA")
    ended = run_python("import torch, torch_lms; torch_lms.pageout(torch.ones(3))", TORCH_SWAP_CPU="0")
    assert "torch_lms.errors.LmsError: expected a PyTorch built with CUDA" in ended.stderr


# --- processes --------------------------------------------------------------------------------------------


@pytest.mark.skipif("cpu" not in DEVICES, reason="CUDA does not work in a forked child anyway")
def test_a_forked_child_is_told() -> None:
    program = (
        "import os, torch, torch_lms\n"
        "tensor = torch.ones(9)\n"
        "torch_lms.pageout(tensor); torch_lms.wait()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    for call in (lambda: torch_lms.pageout(tensor), torch_lms.wait):\n"
        "        try:\n            call()\n"
        "        except torch_lms.errors.LmsError as error:\n            assert 'spawn' in str(error)\n"
        "        else:\n            os._exit(3)\n"
        "    os._exit(0 if torch.equal(tensor, torch.ones(9)) else 4)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert torch.equal(tensor, torch.ones(9))\n"
    )
    ended = run_python(program)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("last", ["", "torch_lms.prefetch(tensors)", "torch.cuda.prefetch_init()"])
def test_a_program_that_ends_while_paging_ends_in_silence(device: str, last: str) -> None:
    program = (
        "import torch, torch_lms\n"
        f"tensors = [torch.ones(1 << 20, device={device!r}) for _ in range(20)]\n"
        "torch_lms.pageout(tensors)\n" + last
    )
    ended = run_python(program)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
