"""Times the two parts of a backward that zero bubble splits: gradients of values first, those of weights later.

Only where a node gets values and weights are there two parts; what has no weights has nothing in the second, what has
no values nothing in the first. The two parts may take longer than the whole: what both need is computed twice.

What `torch.distributed.pipelining` computes in each part is told in ``weight_meetings``.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch

from torch_lms.profile.alone import Alone, Prepared
from torch_lms.profile.storages import ones_for
from torch_lms.profile.timing import Clock

__all__ = ["NO_WEIGHTS", "PartShares", "part_shares"]

_WARMUP_RUNS, _TIMED_RUNS = 2, 8


class PartShares(NamedTuple):
    """Of the time of a node's whole backward, what each of its two parts takes."""

    inputs: float
    weights: float


NO_WEIGHTS, _NO_VALUES = PartShares(1.0, 0.0), PartShares(0.0, 1.0)


def part_shares(clock: Clock, accumulate: bool, node: Alone) -> PartShares:
    """Of a node whose output needs a gradient.

    Args:
        clock: of the device that runs.
        accumulate: whether gradients of weights are added to others.
        node: what is timed.
    """
    if not node.weights or not node.needs_gradient:
        return NO_WEIGHTS
    if not node.values or node.of_weights:
        return _NO_VALUES
    sums = [torch.zeros_like(one) for one in node.weights] if accumulate else []
    found = [_time(clock, node, sums) for _ in range(_WARMUP_RUNS + _TIMED_RUNS)][_WARMUP_RUNS:]
    whole, inputs, own = (statistics.median(times) for times in zip(*found, strict=True))
    return PartShares(inputs / whole, own / whole) if whole > 0 else _NO_VALUES


def _time(clock: Clock, node: Alone, sums: Sequence[torch.Tensor]) -> tuple[float, float, float]:
    """Microseconds of the whole, of the gradients of values, and of those of weights."""
    run = Prepared(node)
    run()
    outputs = run.roots
    gradients = [ones_for(one) for one in outputs]
    clock.lead()
    marks = [clock.mark()]
    for asked, last in (([*node.values, *node.weights], False), (node.values, False), (node.weights, True)):
        found = torch.autograd.grad(outputs, asked, gradients, retain_graph=not last, allow_unused=True)
        for own, gradient in zip(sums, found[-len(node.weights) :], strict=False):
            if asked is not node.values and gradient is not None:
                own.add_(gradient)
        marks.append(clock.mark())
    clock.wait()
    whole, inputs, own_us = (clock.elapsed_us(*pair) for pair in itertools.pairwise(marks))
    return whole, inputs, own_us
