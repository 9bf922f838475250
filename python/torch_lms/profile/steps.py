"""A whole step: forward and backward of a model as training runs them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import nn

from torch_lms.profile.arguments import Sample
from torch_lms.profile.storages import ones_for, tensors_in
from torch_lms.profile.timing import Clock

__all__ = ["StepTime", "backward_of", "roots_of", "time_step", "typical_step"]


@dataclass(frozen=True)
class StepTime:
    """One step.

    Attributes:
        forward_us: from its start to that of its backward, on the device.
        backward_us: from there to its end.
        forward_ahead_us: how far Python was ahead of the device where it had given it the forward.
        backward_ahead_us: the same at the end.
    """

    forward_us: float
    backward_us: float
    forward_ahead_us: float = 0.0
    backward_ahead_us: float = 0.0

    @property
    def step_us(self) -> float:
        """All of it."""
        return self.forward_us + self.backward_us


def typical_step(steps: Sequence[StepTime]) -> StepTime:
    """Of each figure the median; of no steps one that takes no time."""
    if not steps:
        return StepTime(0.0, 0.0)
    return StepTime(*(statistics.median(figures) for figures in zip(*map(astuple, steps), strict=True)))


def roots_of(output: Any) -> list[torch.Tensor]:
    """Where a backward starts: the loss, if there is one, else all outputs that need a gradient."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad and loss.numel() == 1:
        return [loss]
    found = {id(tensor): tensor for tensor in tensors_in(output) if tensor.requires_grad and tensor.grad_fn is not None}
    return list(found.values())


def backward_of(output: Any) -> Callable[[], None] | None:
    """The backward of a model's output, with the gradients of `ones_for`; None where nothing needs a gradient."""
    roots = roots_of(output)
    if not roots:
        return None
    gradients = [ones_for(root) for root in roots]
    return lambda: torch.autograd.backward(roots, gradients)


def time_step(
    model: nn.Module,
    sample: Sample,
    tensors: Sequence[torch.Tensor],
    clock: Clock,
    precision: AbstractContextManager[Any],
) -> StepTime:
    """Runs a step, its forward under a precision, and times it."""
    start, began_ns = clock.mark(), time.perf_counter_ns()
    with torch.enable_grad():
        with precision:
            output = sample.call(model, tensors)
        backward = backward_of(output)
        del output
    middle, forward_host_us = clock.mark(), (time.perf_counter_ns() - began_ns) / 1e3
    if backward is not None:
        backward()
    end, host_us = clock.mark(), (time.perf_counter_ns() - began_ns) / 1e3
    clock.wait()
    forward_us, backward_us = clock.elapsed_us(start, middle), clock.elapsed_us(middle, end)
    return StepTime(forward_us, backward_us, forward_us - forward_host_us, forward_us + backward_us - host_us)
