"""The step that is recorded for a plan: its ops are run again, and no more goes out for that than has to."""

from __future__ import annotations

import torch
from torch.nn import functional as F  # noqa: N812  # PyTorch's own name for it

import torch_lms
from tests.unit.fresh_process import in_fresh_process
from tests.unit.markers import counts_exactly
from tests.unit.planned_programs import wait_for_planner
from tests.unit.trainings import MIN_BYTES, one_thread
from torch_lms.swap.planning import last_trace

ROWS, WIDTH, CLASSES, LAYERS = 2048, 64, 2048, 6
LOGITS_BYTES = 4 * ROWS * CLASSES
SHARE = 0.7  # of the peak, which the loss's backward makes: there is no room beside it


@one_thread()
def paged_out_bytes() -> list[int]:
    """In each step of a classifier, until one has been recorded."""
    torch.manual_seed(0)
    ups = [torch.randn(WIDTH, 4 * WIDTH).div(8).requires_grad_() for _ in range(LAYERS)]
    downs = [torch.randn(4 * WIDTH, WIDTH).div(16).requires_grad_() for _ in range(LAYERS)]
    head = torch.randn(WIDTH, CLASSES).div(8).requires_grad_()
    x, labels = torch.randn(ROWS, WIDTH), torch.arange(ROWS) % CLASSES

    def step() -> None:
        for parameter in (*ups, *downs, head):
            parameter.grad = None
        made = x
        for up, down in zip(ups, downs, strict=True):
            made = made + F.gelu(made @ up) @ down
        F.cross_entropy(made @ head, labels).backward()

    step()
    torch_lms.swap.count_cpu_allocations()
    torch_lms.stats(reset=True)
    step()
    torch_lms.enable(int(SHARE * torch_lms.stats().peak_allocated_bytes), min_bytes=MIN_BYTES)
    found = []
    while last_trace() is None:
        torch_lms.stats(reset=True)
        step()
        found.append(torch_lms.stats().pageout_bytes)
        wait_for_planner()
    return found


@counts_exactly
def test_nothing_goes_out_for_ops_of_a_backward_that_are_run_again() -> None:
    first, on_demand, *others = in_fresh_process(paged_out_bytes)
    assert 0 < on_demand <= first
    assert others
    assert max(others) < on_demand + LOGITS_BYTES  # what the loss's backward makes
