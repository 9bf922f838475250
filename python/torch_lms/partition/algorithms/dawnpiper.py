"""DawnPiper's binary partition between the time-balanced and the memory-balanced cut.

Source: Peng et al., "DawnPiper: a memory-scalable pipeline parallel training framework", arXiv:2505.05856. Stages are
cut in two halves again and again. The best cut of a range lies between the one that balances time and the one that
balances memory: beyond either, both grow on one side. Some cuts between these two are tried, of each share of the way
the one that the fewest bytes cross, and the one with the smallest largest stage time that fits is kept; if none fits,
the one that comes closest. A stage that has no room gives up what costs it the least time (`recompute_and_swap`), and
its time with that counts. Here stages that share a device have equal parts of its memory.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from torch_lms.partition.interface import Partition, PartitionProblem, evaluate
from torch_lms.partition.intervals import StageMatrices, stage_matrices
from torch_lms.partition.layers import node_costs
from torch_lms.partition.relief import StageNeed
from torch_lms.partition.sequence import UnitSequence
from torch_lms.partition.weight_gradients import kept_by_units

__all__ = ["DawnPiper"]

Array = NDArray[np.float64]
Plan = tuple[float, float, tuple[int, ...]]  # how far over memory, largest stage time, cuts

_MOST_PLANS = 4000
_MOST_EXACT = 1500


class DawnPiper:
    """Halves stages between the cut that balances time and the one that balances memory."""

    name = "dawnpiper"
    source = "DawnPiper, arXiv:2505.05856, binary pipeline partitioning"

    def partition(self, problem: PartitionProblem) -> Partition:
        """See the class."""
        sequence = UnitSequence(problem.units)
        _, _, cuts = _Halving(problem, sequence).plan(0, len(sequence), 0, problem.stages)
        reason = "stages halved between the cuts that balance time and memory"
        return evaluate(problem, sequence.stages(cuts), algorithm=self.name, reason=reason)


class _Halving:
    def __init__(self, problem: PartitionProblem, sequence: UnitSequence) -> None:
        model, units = problem.cost_model, problem.units
        self.time, self.relief = sequence.time_before_us, model.relief
        self.forward = np.concatenate([[0.0], np.cumsum(units.forward_us[sequence.order])])
        held = node_costs(units, dict.fromkeys(problem.graph.parameter_bytes, 0.0))
        static = node_costs(units, model.parameter_cost_bytes(problem.graph)) - held
        self.held = np.concatenate([[0.0], np.cumsum(held)])
        self.kept = np.concatenate([[0.0], np.cumsum(kept_by_units(units)[sequence.order])])
        self.static = np.concatenate([[0.0], np.cumsum(static)])
        self.crossing = sequence.cut_forward_bytes + sequence.cut_backward_bytes
        self.speed = np.array([device.speed for device in problem.devices])
        shared = Counter(device.name for device in problem.devices)
        self.usable = [model.usable_bytes(device) / shared[device.name] for device in problem.devices]
        self.step = problem.step_on(problem.devices)
        self.in_flight, self.half_done = np.array(self.step.in_flight), np.array(self.step.half_done)
        depth = max((problem.stages - 1).bit_length(), 1)
        self.tries = max(int((_MOST_PLANS ** (1 / depth)) / 2), 2)
        self.exact = self._exact_memory(problem, sequence)
        self.known: dict[tuple[int, int, int, int], Plan] = {}

    def plan(self, start: int, end: int, first: int, stages: int) -> Plan:
        """The best plan for positions ``start`` to ``end`` on some stages from ``first`` on."""
        key = (start, end, first, stages)
        if key not in self.known:
            self.known[key] = self._leaf(start, end, first) if stages == 1 else self._halve(start, end, first, stages)
        return self.known[key]

    def _leaf(self, start: int, end: int, stage: int) -> Plan:
        time_us = float(self.time[end] - self.time[start]) / float(self.speed[stage])
        memory = float(self._memory(start, end, stage, 1))
        if self.exact is not None:
            made = self.relief.relieve(self._need(self.exact, start, end, stage), self.usable[stage])
            time_us, memory = float(made.time_us), float(made.memory_bytes)
        return max(memory / self.usable[stage] - 1, 0.0), time_us, ()

    def _need(self, exact: StageMatrices, start: int, end: int, stage: int) -> StageNeed:
        speed = float(self.speed[stage])
        need = exact.need(
            (start, end),
            self.step,
            stage,
            times_us=((self.time[end] - self.time[start]) / speed, (self.forward[end] - self.forward[start]) / speed),
            speed=speed,
            cuts=(start, end),
        )
        coarser = tuple(one.within(start, end) for one in exact.coarser)
        return replace(need, offers=exact.offers.within(start, end), coarser=coarser)

    def _exact_memory(self, problem: PartitionProblem, sequence: UnitSequence) -> StageMatrices | None:
        """Of every contiguous stage, where memory matters and the graph is small enough for that."""
        if len(sequence) > _MOST_EXACT or all(device.memory_cap_bytes is None for device in problem.devices):
            return None
        return stage_matrices(sequence, np.arange(len(sequence) + 1), problem.cost_model)

    def _halve(self, start: int, end: int, first: int, stages: int) -> Plan:
        left = stages // 2
        best: Plan | None = None
        for cut in self._tried(start, end, first, stages):
            over_a, time_a, cuts_a = self.plan(start, cut, first, left)
            over_b, time_b, cuts_b = self.plan(cut, end, first + left, stages - left)
            made = max(over_a, over_b), max(time_a, time_b), (*cuts_a, cut, *cuts_b)
            best = made if best is None or made < best else best
        assert best is not None  # there is at least one cut to try
        return best

    def _tried(self, start: int, end: int, first: int, stages: int) -> list[int]:
        """Cuts from the time-balanced to the memory-balanced one."""
        left = stages // 2
        cuts = np.arange(start + left, end - (stages - left) + 1)
        speed_a = self.speed[first : first + left].sum()
        speed_b = self.speed[first + left : first + stages].sum()
        times = np.maximum((self.time[cuts] - self.time[start]) / speed_a, (self.time[end] - self.time[cuts]) / speed_b)
        memories = np.maximum(
            self._memory(start, cuts, first, left), self._memory(cuts, end, first + left, stages - left)
        )
        low, high = sorted((int(times.argmin()), int(memories.argmin())))
        if high - low < self.tries:
            return [int(cut) for cut in cuts[low : high + 1]]
        shares = np.array_split(np.arange(low, high + 1), self.tries)
        cheap = [share[int(self.crossing[cuts[share]].argmin())] for share in shares]
        return sorted({int(cuts[index]) for index in (low, *cheap, high)})

    def _memory(self, start: NDArray[np.int64] | int, end: NDArray[np.int64] | int, first: int, stages: int) -> Array:
        """What each of some stages takes of a range, were it cut evenly."""
        in_flight = self.in_flight[first : first + stages].mean()
        half_done = self.half_done[first : first + stages].mean()
        flying = in_flight * (self.held[end] - self.held[start]) + half_done * (self.kept[end] - self.kept[start])
        need: Array = (self.static[end] - self.static[start] + flying) / stages
        return need
