"""DAPPLE's planner, for one device a stage.

Source: Fan et al., "DAPPLE: a pipelined data parallel approach for training large models", arXiv:2007.01045, sections
IV and V. A plan's latency is told by its pivot, the stage that the steady phase waits for: ``L = sum(F of stages up to
it) + (M - 1) * (F + B of it) + sum(B of stages up to it)``, where transfers count as stages of their own. The pivot is
first the last stage; going to the front, a stage takes over if its own steady phase is longer than the pivot's and all
the work between them. The planner grows plans from the front: of all plans with as many stages that end at the same
layer, the one lives on whose latency is least if all other layers are a last stage, shared by the devices left.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from torch_lms.partition.interface import Partition, PartitionProblem, evaluate
from torch_lms.partition.layers import Layers
from torch_lms.partition.sequence import UnitSequence

__all__ = ["DapplePlanner", "plan_latency"]

Array = NDArray[np.float64]
_MOST_LAYERS = 192


class DapplePlanner:
    """The plan of least latency by its pivot stage."""

    name = "dapple"
    source = "DAPPLE, arXiv:2007.01045, sections IV and V; one device a stage"

    def partition(self, problem: PartitionProblem) -> Partition:
        """See the class."""
        cuts = _layer_cuts(problem)
        plan, latency = _Planner(problem, cuts).plan()
        reason = f"the plan of least latency, {latency:.1f} us, among cuts between layers"
        return evaluate(problem, UnitSequence(problem.units).stages(plan), algorithm=self.name, reason=reason)


def plan_latency(forward_us: Array, backward_us: Array, microbatches: int) -> Array:
    """The latency of plans by their pivots; stages in the first dimension, plans in the others."""
    both = forward_us + backward_us
    steady = (microbatches - 1) * both
    pivot = both[-1] * 0 + (len(both) - 1)
    pivot_steady, between = steady[-1], np.zeros_like(both[-1])
    for stage in range(len(both) - 2, -1, -1):
        takes_over = steady[stage] > pivot_steady + between
        pivot = np.where(takes_over, stage, pivot)
        pivot_steady = np.where(takes_over, steady[stage], pivot_steady)
        between = np.where(takes_over, 0.0, between + both[stage])
    before = np.cumsum(both, axis=0)
    upto = np.take_along_axis(before, pivot[None].astype(np.int64), axis=0)[0]
    latency: Array = upto + pivot_steady
    return latency


def _layer_cuts(problem: PartitionProblem) -> NDArray[np.int64]:
    """Cuts between layers, with both ends; at most so many that planning stays quick."""
    starts = Layers.of(problem.units, problem.stages).starts
    if len(starts) > _MOST_LAYERS:
        before = UnitSequence(problem.units).time_before_us
        even = np.searchsorted(before[starts], before[-1] * np.arange(_MOST_LAYERS) / _MOST_LAYERS)
        kept = np.unique(np.concatenate([[0], np.minimum(even, len(starts) - 1)]))
        if len(kept) >= problem.stages:
            starts = starts[kept]
    return np.append(starts, len(problem.units))


class _Planner:
    def __init__(self, problem: PartitionProblem, cuts: NDArray[np.int64]) -> None:
        sequence = UnitSequence(problem.units)
        self.cuts = cuts
        self.problem = problem
        self.forward = np.concatenate([[0.0], np.cumsum(problem.units.forward_us)])[cuts]
        self.backward = np.concatenate([[0.0], np.cumsum(problem.units.backward_us)])[cuts]
        links = problem.links_between(problem.devices)
        crossing = (sequence.cut_forward_bytes[cuts], sequence.cut_backward_bytes[cuts])
        self.send = [np.array([link.transfer_us(nbytes) for nbytes in crossing[0]]) for link in links]
        self.back = [np.array([link.transfer_us(nbytes) for nbytes in crossing[1]]) for link in links]

    def plan(self) -> tuple[list[int], float]:
        """The cuts of the best plan, and its latency."""
        stages = self.problem.stages
        end = len(self.cuts) - 1
        latency = float(self._latency([], np.array([0]))[0])
        plans: dict[int, list[int]] = {0: []}
        for done in range(1, stages):
            grown: dict[int, tuple[float, list[int]]] = {}
            for start, plan in plans.items():
                ends = np.arange(start + 1, end - (stages - done) + 1)
                for cut, cost in zip(ends, self._latency(plan, ends), strict=True):
                    if cost < grown.get(int(cut), (np.inf, []))[0]:
                        grown[int(cut)] = (float(cost), [*plan, int(cut)])
            latency = min(grown.values())[0]
            plans = {cut: plan for cut, (_, plan) in sorted(grown.items(), key=lambda item: item[1][0])}
        return [int(self.cuts[cut]) for cut in next(iter(plans.values()))], latency

    def _latency(self, plan: list[int], ends: NDArray[np.int64]) -> Array:
        """Of the plan with one cut more at each of some places, and one stage behind it on the devices left."""
        first = np.zeros_like(ends)
        last = np.full_like(ends, len(self.cuts) - 1)
        inner = [*(np.full_like(ends, cut) for cut in plan), ends] if self.problem.stages > 1 else []
        marks = [first, *inner, last]
        forward, backward = [], []
        for stage, (start, stop) in enumerate(itertools.pairwise(marks)):
            if stage > 0:
                forward.append(self.send[stage - 1][start])
                backward.append(self.back[stage - 1][start])
            devices = self.problem.devices[stage : stage + 1 if stage < len(inner) else None]
            speed = sum(device.speed for device in devices)
            forward.append((self.forward[stop] - self.forward[start]) / speed)
            backward.append((self.backward[stop] - self.backward[start]) / speed)
        return plan_latency(np.array(forward), np.array(backward), self.problem.cost_model.microbatches)
