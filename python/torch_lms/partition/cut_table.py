"""The stages between some cuts of an order, as arrays: what they take, and the cuts that an additive cost prefers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torch_lms.partition.costs import CostModel, DeviceSpec
from torch_lms.partition.intervals import StageMatrices, parameter_matrix, stage_matrices
from torch_lms.partition.link_spec import LinkSpec
from torch_lms.partition.relief import KEEP_ALL, StageNeed, relieve_device
from torch_lms.partition.sequence import UnitSequence
from torch_lms.partition.steps import (
    BACK,
    BACKWARDS,
    COMPUTED,
    FORWARDS,
    REDUCE,
    ROWS,
    SEND,
    TAIL,
    UPDATE,
    WEIGHTS,
    TrainingStep,
    add_to_backwards,
    unit_times_us,
)

__all__ = ["CutTable", "Lowest", "Marks"]

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Marks = NDArray[np.int64]  # a row for each partition: the cuts from 0 to the end, as indices into those of the table
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Lowest:
    """The cuts with the lowest additive cost.

    Attributes:
        cost_us: of these cuts.
        marks: the cuts, from 0 to the end.
        after_us: the lowest cost of all stages from one on, by that stage and its first cut.
    """

    cost_us: float
    marks: Ints
    after_us: Array


class CutTable:
    """What stages between some cuts take; index i of every array stands for ``cuts[i]``.

    Args:
        sequence: the order.
        devices: of the stages.
        links: between them.
        model: prices.
        cuts: ascending, with 0 and the end among them.
    """

    def __init__(
        self,
        sequence: UnitSequence,
        devices: Sequence[DeviceSpec],
        links: Sequence[LinkSpec],
        model: CostModel,
        cuts: Ints,
    ) -> None:
        self.cuts, self.devices, self.model = cuts, devices, model
        self.stages = len(devices)
        self.step = TrainingStep.of([device.name for device in devices], model)
        units, order = sequence.units, sequence.order
        first, others = (
            np.array([np.concatenate([[0.0], np.cumsum(times[order])])[cuts] for times in rows])
            for rows in (unit_times_us(units, model, stage) for stage in (0, 1))
        )
        self._before = [first, *[others] * (self.stages - 1)]  # of each stage, what comes before a cut, by row
        self.send = np.array([link.transfer_us(sequence.cut_forward_bytes[cuts]) for link in links])
        self.back = np.array([link.transfer_us(sequence.cut_backward_bytes[cuts]) for link in links])
        graph = units.graph
        self._ends: dict[int, list[Array]] = {}  # by stage
        self._gradient_bytes: Array | None = None  # where they are reduced
        if model.data_parallel.ranks > 1:
            gradients = self._gradient_bytes = parameter_matrix(sequence, cuts, model.gradient_bytes(graph))
            self._ends[REDUCE] = [model.data_parallel.all_reduce_us(gradients)] * self.stages
        if model.optimizer_offload is not None or graph.optimizer_us:
            states = parameter_matrix(sequence, cuts, model.optimizer_state_bytes(graph))
            computed = parameter_matrix(sequence, cuts, graph.optimizer_us or {})
            self._ends[UPDATE] = [computed / device.speed + model.update_us(states) for device in devices]
        self.usable = [model.usable_bytes(devices[own[0]]) for own in self.step.stages_of]
        capped = any(device.memory_cap_bytes is not None for device in devices)
        self.memory: StageMatrices | None = stage_matrices(sequence, cuts, model) if capped else None
        forward = np.where(np.tri(len(cuts), dtype=bool), np.inf, 0.0)
        self._refusals: list[Array] = [forward] * self.stages  # infinite where a stage cannot be, else 0
        self._relieved: list[Array | None] = [None] * self.stages
        self.shares = [forward] * self.stages
        for stage in range(self.stages):
            self._look_at_memory(stage, forward)

    def _look_at_memory(self, stage: int, refusal: Array) -> None:
        """What a stage would take of its device if it were alone there."""
        device = next(device for device, own in enumerate(self.step.stages_of) if stage in own)
        if self.memory is None or self.usable[device] == np.inf:
            return
        times_us = [(before[None, :] - before[:, None]) / self.devices[stage].speed for before in self._before[stage]]
        need = self.memory.need(
            ...,
            self.step,
            stage,
            times_us=(sum(times_us), times_us[FORWARDS]),
            speed=self.devices[stage].speed,
            cuts=(self.cuts[:, None], self.cuts[None, :]),
        )
        made = self.model.relief.relieve(need, self.usable[device])
        share = np.ceil(made.memory_bytes) / self.usable[device]
        self.shares[stage] = share + refusal
        self._refusals[stage] = np.where(share > 1 + _ROUNDING, np.inf, refusal)
        self._relieved[stage] = None if self.model.relief is KEEP_ALL else made.time_us - need.time_us

    def costs(self, stage: int, passes: Array, starts: Ints | slice = slice(None)) -> Array:
        """The additive cost of a stage, with the border before it: by its first cut, of some, and its last.

        Args:
            stage: which.
            passes: how often each row of each stage counts; see ``steps``.
            starts: first cuts, as indices.
        """
        before = passes[:COMPUTED, stage] @ self._before[stage] / self.devices[stage].speed
        first = -before
        if stage > 0:
            first = (
                first + passes[SEND, stage - 1] * self.send[stage - 1] + passes[BACK, stage - 1] * self.back[stage - 1]
            )
        cost: Array = first[starts, None] + before[None, :]
        relieved = self._relieved[stage]
        backward = passes[BACKWARDS : WEIGHTS + 1, stage] @ self.model.relief_shares(stage)
        if relieved is not None and backward:
            cost += backward * relieved[starts]
        for row, times in self._ends.items():
            if passes[row, stage]:
                cost += passes[row, stage] * times[stage][starts]
        if passes[TAIL, stage] and self._gradient_bytes is not None:
            own = self._before[stage][BACKWARDS]
            last = (own[None, :] - own[starts, None]) / self.devices[stage].speed
            last = last if relieved is None else last + relieved[starts]
            cost += passes[TAIL, stage] * self._tail_us((starts,), last)
        cost += self._refusals[stage][starts]
        return cost

    def _tail_us(self, at: tuple[Any, ...], backward_us: Array) -> Array:
        assert self._gradient_bytes is not None
        reduce_us = self._ends[REDUCE][0][at]
        tail: Array = self.model.data_parallel.tail_us(self._gradient_bytes[at], reduce_us, backward_us)
        return tail

    def lowest(self, passes: Array) -> Lowest:
        """The cuts of the lowest additive cost, by dynamic programming from the last stage on."""
        return self.choose([self.costs(stage, passes) for stage in range(self.stages)])

    def choose(self, costs: Sequence[Array]) -> Lowest:
        """The cuts of the lowest sum of one matrix for each stage."""
        end = len(self.cuts) - 1
        after = np.full((self.stages + 1, end + 1), np.inf)
        after[self.stages, end] = 0.0
        ends = []
        for stage in range(self.stages - 1, -1, -1):
            ways = costs[stage] + after[stage + 1][None, :]
            ends.append(ways.argmin(axis=1))
            after[stage] = ways[np.arange(end + 1), ends[-1]]
        marks = [0]
        for chosen in reversed(ends):
            marks.append(int(chosen[marks[-1]]))
        return Lowest(float(after[0, 0]), np.array(marks, dtype=np.int64), after)

    @staticmethod
    def lowest_largest(matrices: Sequence[Array]) -> float:
        """The smallest largest entry over all ways to cut."""
        best = np.where(np.arange(len(matrices[0])) == 0, -np.inf, np.inf)
        for matrix in matrices:
            best = np.maximum(best[:, None], matrix).min(axis=0)
        return float(best[-1])

    def loads(self) -> list[Array]:
        """What each stage keeps its device busy with for each microbatch, its own transfers included."""
        passes = np.zeros((ROWS, self.stages))
        passes[:COMPUTED] = 1.0
        loads = [self.costs(stage, passes) for stage in range(self.stages)]
        for stage in range(1, self.stages):
            send, back = self.send[stage - 1], self.back[stage - 1]
            if self.model.overlap_communication:
                loads[stage] = np.maximum(loads[stage], np.maximum(send, back)[:, None])
            else:
                loads[stage] = loads[stage] + send[:, None]
                loads[stage - 1] = loads[stage - 1] + back[None, :]
        return loads

    def rows(self, marks: Marks) -> tuple[Array, Array]:
        """The times of many partitions, and what each takes of the fullest device's memory."""
        rows = np.zeros((ROWS, self.stages, len(marks)))
        for stage in range(self.stages):
            start, stop = marks[:, stage], marks[:, stage + 1]
            before = self._before[stage]
            rows[:COMPUTED, stage] = (before[:, stop] - before[:, start]) / self.devices[stage].speed
            if stage > 0:
                rows[SEND, stage - 1] = self.send[stage - 1][start]
                rows[BACK, stage - 1] = self.back[stage - 1][start]
            for row, times in self._ends.items():
                rows[row, stage] = times[stage][start, stop]
        share = np.zeros(len(marks))
        if self.memory is not None:
            for device, usable in enumerate(self.usable):
                if usable < np.inf:
                    share = np.maximum(share, self._fit(device, marks, rows) / usable)
        for stage in range(self.stages if self._gradient_bytes is not None else 0):
            rows[TAIL, stage] = self._tail_us((marks[:, stage], marks[:, stage + 1]), rows[BACKWARDS, stage])
        return rows, share

    def _fit(self, device: int, marks: Marks, rows: Array) -> Array:
        """The memory of a device; what relief costs goes to its stages' backwards."""
        own = self.step.stages_of[device]
        needs = {stage: self._need(stage, marks, rows) for stage in own}
        together = self.step.memory_bytes(device, needs)
        relieved, memory = relieve_device(self.model.relief, list(needs.values()), together, self.usable[device])
        for stage, one in zip(own, relieved, strict=True):
            add_to_backwards(rows, self.model, stage, one.time_us - needs[stage].time_us)
        taken: Array = np.ceil(memory)
        return taken

    def _need(self, stage: int, marks: Marks, rows: Array) -> StageNeed:
        """Of one stage in many partitions."""
        assert self.memory is not None  # that is why one asks
        at = marks[:, stage], marks[:, stage + 1]
        return self.memory.need(
            at,
            self.step,
            stage,
            times_us=(rows[:COMPUTED, stage].sum(axis=0), rows[FORWARDS, stage]),
            speed=self.devices[stage].speed,
            cuts=(self.cuts[at[0]], self.cuts[at[1]]),
        )
