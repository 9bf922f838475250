"""Programs that say how exact 32-bit products are to be are planned, and what is made again has their bits."""

from __future__ import annotations

import os
import tempfile

import pytest
import torch

import torch_lms
from tests.unit.fresh_process import in_fresh_process
from tests.unit.markers import counts_exactly
from tests.unit.planned_programs import digest, limit_for, on, plain_training, run, wait_for_planner
from tests.unit.trainings import one_thread
from torch_lms.swap.planning import last_trace

PLANNED_WITHIN_S = 150


@one_thread()
def planned_with(backend: str, precision: str) -> tuple[bool, bool, bool, str]:
    """Whether the bits are right, some op can be run again, and the switch is as it was; and what was logged."""
    switches = getattr(torch.backends, backend).matmul
    switches.fp32_precision = precision
    limit_bytes = limit_for(plain_training)
    expected, equal = list(run(plain_training)), True
    with tempfile.TemporaryFile() as said:
        before = os.dup(2)
        os.dup2(said.fileno(), 2)  # PyTorch logs what a callback throws
        on(limit_bytes)
        for made, same in zip(run(plain_training), expected, strict=True):
            equal = equal and made == same
            if last_trace() is not None:
                break
        os.dup2(before, 2)
        said.seek(0)
        text = said.read().decode(errors="replace")
    trace = last_trace()
    can_be_made = trace is not None and any(storage.recompute is not None for storage in trace.storages)
    torch_lms.disable()
    return equal, can_be_made, switches.fp32_precision == precision, text


@counts_exactly
@pytest.mark.parametrize(("backend", "precision"), [("cuda", "tf32"), ("mkldnn", "bf16")])
def test_a_program_that_sets_the_precision_of_one_backend_is_planned(backend: str, precision: str) -> None:
    equal, can_be_made, kept, said = in_fresh_process(planned_with, backend, precision, within_s=PLANNED_WITHIN_S)
    assert equal
    assert can_be_made
    assert kept
    assert "Exception in" not in said


def seen_precisions() -> list[str]:
    """Of 32-bit floats, by each kind of op of each backend."""
    backends = torch.backends
    return [
        one.fp32_precision
        for one in (backends.mkldnn.matmul, backends.mkldnn.conv, backends.cuda.matmul, backends.cudnn.conv)
    ]


def set_for_all(precision: str) -> None:
    torch.backends.fp32_precision = precision  # type: ignore[attr-defined]


def set_for_forward(alone: bool) -> None:
    set_for_all("tf32" if alone else "ieee")
    if alone:
        torch.backends.mkldnn.matmul.fp32_precision = "ieee"


def set_for_backward(alone: bool) -> None:
    set_for_all("ieee" if alone else "tf32")
    if alone:
        torch.backends.mkldnn.matmul.fp32_precision = "none"


@one_thread()
def precisions_after_recomputation(paged: bool, alone: bool) -> tuple[bool, list[list[str]]]:
    """Of a program that sets one for forward and another for backward, and then each for all.

    Args:
        alone: in forward one kind of op has another than the rest, and in backward none of its own.
    """
    torch.manual_seed(0)
    layers = [torch.randn(128, 128, requires_grad=True) for _ in range(6)]
    if paged:
        torch_lms.enable("2500KiB", min_bytes=4096, swap=False)
    for _ in range(16):
        set_for_forward(alone)
        x = torch.randn(256, 128)
        for layer in layers:
            rectified = torch.relu(x @ layer + 1)
            x = x + rectified * torch.sigmoid(rectified)
        set_for_backward(alone)
        torch.autograd.grad(x.square().mean(), layers)
        wait_for_planner()
    seen = []
    for precision in ("tf32", "ieee", "none"):
        set_for_all(precision)
        seen.append(seen_precisions())
    return torch_lms.stats().recomputations > 0, seen


@counts_exactly
@pytest.mark.parametrize("alone", [False, True])
def test_a_precision_that_is_set_for_all_reaches_all_ops_after_some_were_run_again(alone: bool) -> None:
    recomputed, seen = in_fresh_process(precisions_after_recomputation, True, alone)
    assert recomputed
    assert seen == in_fresh_process(precisions_after_recomputation, False, alone)[1]


@one_thread()
def with_other_convolutions() -> tuple[bool, bool]:
    """Whether gradients are the same where forward's convolutions are not those that backward would choose."""

    def train() -> list[str]:
        torch.manual_seed(0)
        kernels = [torch.randn(16, 16, 3, 3).mul_(0.1).requires_grad_() for _ in range(8)]
        made: list[str] = []
        for _ in range(14):
            x = torch.randn(16, 16, 16, 16)
            with torch.backends.mkldnn.flags(enabled=False), torch.backends.nnpack.flags(enabled=False):
                for kernel in kernels:
                    image = torch.conv2d(x, kernel, padding=1)
                    x = x + torch.relu(image) * torch.sigmoid(image)
            made += digest(list(torch.autograd.grad(x.square().mean(), kernels)))
            wait_for_planner()
        return made

    expected = train()
    torch_lms.enable("6MiB", min_bytes=4096, swap=False)
    made = train()
    return made == expected, torch_lms.stats().recomputations > 0


@counts_exactly
@pytest.mark.skipif(not torch.backends.nnpack.is_available(), reason="this PyTorch has no NNPACK")
def test_convolutions_are_run_again_by_the_library_of_their_first_time() -> None:
    assert in_fresh_process(with_other_convolutions) == (True, True)
