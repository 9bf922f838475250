"""The executor for PyTorch without pipelines of its own."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import torch

from torch_lms.pipeline.executor import Executor
from torch_lms.schedules.rules import one_f_one_b
from torch_lms.schedules.traffic import expected_us


class Alone:
    """The only stage. Notes before each forward which outputs of earlier ones are still there."""

    is_last = True
    device = torch.device("cpu")
    stage = SimpleNamespace(index=0)

    def __init__(self) -> None:
        self.outputs: list[Any] = []
        self.alive: list[int] = []

    def __call__(self) -> torch.Tensor:
        self.alive.append(sum(output() is not None for output in self.outputs))
        output = torch.ones((), requires_grad=True) * 2
        self.outputs.append(weakref.ref(output))
        return output


def test_a_microbatch_whose_backward_is_over_holds_nothing_while_the_next_one_runs_forward() -> None:
    boundary: Any = Alone()
    nothing: Any = SimpleNamespace(begin=lambda action: None, end=lambda action: None)
    losses = Executor(boundary, one_f_one_b(1, 3), expected_us(), [], nothing).step()
    assert [loss.item() for loss in losses] == [2.0] * 3
    assert boundary.alive == [0, 0, 0]
