"""A training step as its schedule makes it: when it ends, what it waits for, and what each device holds at once.

Note [Longest path]: the order of each device's actions and of each link's transfers is the schedule's, so a step's time
is the longest path through a fixed graph whose nodes take times that are known for each stage and each border. On any
one path the time is a sum over stages and borders, each weighted by how often the path passes it; so is each average of
paths. No step is shorter than one of these, which is what a search over cuts is bounded by.

Note [Tails]: buckets that become final one after the other, and are reduced one after the other, end with the last of
all reductions that begin with some bucket: when that became final, it and those after it follow. So an all-reduce ends
its `TAIL` after the backward, or the whole of it after the all-reduce before it, whichever is later. A longer backward
makes the tail shorter, by no more than it is longer: a path that passes a tail passes its backward too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torch_lms.errors import PartitionError, PipelineError
from torch_lms.partition.costs import CostModel
from torch_lms.partition.moments import half_done, moments_alone, moments_of
from torch_lms.partition.relief import StageNeed
from torch_lms.partition.units import Units
from torch_lms.schedules.actions import BACKWARD, FORWARD, WEIGHT_BACKWARD, Action, Schedule
from torch_lms.schedules.rules import ONE_STAGE_EACH, make_schedule, splits_backward
from torch_lms.schedules.simulation import Task, in_flight, on_ranks, tasks_of
from torch_lms.schedules.traffic import expected_us, in_turn

__all__ = [
    "BACK",
    "BACKWARDS",
    "COMPUTED",
    "FORWARDS",
    "REDUCE",
    "ROWS",
    "SEND",
    "TAIL",
    "UPDATE",
    "WEIGHTS",
    "TrainingStep",
    "add_to_backwards",
    "bubble_of",
    "device_of_stage",
    "row_of",
    "unit_times_us",
]

Array = NDArray[np.float64]

# The rows of the times of stages. Where backwards have two parts BACKWARDS is the first, of the gradients of inputs,
# and WEIGHTS the second; else that is 0. SEND and BACK are those of the border behind a stage, both ways. TAIL is what
# is left of the all-reduce, which is REDUCE, where the last backward ends.
FORWARDS, BACKWARDS, WEIGHTS, SEND, BACK, REDUCE, TAIL, UPDATE = range(8)
COMPUTED = 3  # so many of the first are what devices compute
ROWS = 8
_MOST_AT_ONCE = 4096


@dataclass(frozen=True)
class _Node:
    """What one row of one stage's times comes after."""

    row: int
    stage: int
    needs: tuple[int, ...]


def bubble_of(rows: Array, step_us: float, microbatches: int, devices: int) -> float:
    """The share of the devices' time in which they do not compute, by the times of stages and of the step."""
    busy_us = microbatches * float(rows[:COMPUTED].sum())
    return 1 - busy_us / (devices * step_us) if step_us > 0 else 0.0


def device_of_stage(names: Sequence[str]) -> tuple[int, ...]:
    """The number of each stage's device; a device that is named again is the same."""
    numbers = {name: index for index, name in enumerate(dict.fromkeys(names))}
    return tuple(numbers[name] for name in names)


class TrainingStep:
    """A schedule on devices, of which one may have several stages.

    Attributes:
        schedule: with a rank for each device.
        stages_of: the stages of each device.
        in_flight: the most microbatches that each stage holds at once.
        replays: how often a microbatch's backward computes again what a stage has given up: each part of it once.
        half_done: the most microbatches of each stage that are in the two parts of their backward at once.
        alone: for each stage by itself, the moments that may be its worst.
        moments: for each device, the microbatches that its stages hold together with the one that runs, at the moments
            that may be its worst.
    """

    def __init__(self, devices: tuple[int, ...], model: CostModel) -> None:
        self.schedule = _schedule(devices, model)
        count = 1 + max(devices)
        self.stages_of = tuple(tuple(s for s, own in enumerate(devices) if own == one) for one in range(count))
        self.in_flight = tuple(in_flight(self.schedule, stage) for stage in range(len(devices)))
        self.half_done = tuple(half_done(self.schedule, stage) for stage in range(len(devices)))
        self.alone = tuple(moments_alone(self.schedule, stage) for stage in range(len(devices)))
        self.moments = tuple(moments_of(self.schedule, rank, self.stages_of[rank]) for rank in range(count))
        self._transfer_share = model.transfer_share if model.overlap_communication else 0.0
        tasks = tasks_of(self.schedule, overlap=model.overlap_communication)
        self._slowed_rows = (FORWARDS, SEND), (WEIGHTS if splits_backward(model.schedule) else BACKWARDS, BACK)
        self._overlap = model.overlap_communication
        self._in_turn = model.transfers_in_turn and self._overlap  # else a device that receives does nothing else
        self.replays = 2 if any(task.action.kind == WEIGHT_BACKWARD for task in tasks) else 1
        self._set_tasks(in_turn(tasks, expected_us()) if self._in_turn else tasks)

    def expecting(self, rows: Array) -> TrainingStep:
        """The same step with its transfers in the order that they have where stages take some times.

        Args:
            rows: times by row and stage.
        """
        if not self._in_turn:
            return self
        found = copy(self)
        times_us = rows[FORWARDS], rows[BACKWARDS] + rows[WEIGHTS], rows[WEIGHTS]
        found._set_tasks(in_turn(tasks_of(self.schedule), expected_us(times_us)))
        return found

    def _set_tasks(self, tasks: Sequence[Task]) -> None:
        self._nodes = [_node(task) for task in tasks]
        self._at = {task.action: index for index, task in enumerate(tasks) if not task.transfer}
        self._add_ends(tasks, self._overlap)
        self._rows = np.array([node.row for node in self._nodes])
        self._stages = np.array([node.stage for node in self._nodes])
        self._needs = [node.needs for node in self._nodes]

    @staticmethod
    def of(names: Sequence[str], model: CostModel) -> TrainingStep:
        """The step of devices in stage order.

        Raises:
            PartitionError: if the schedule does not take these devices or microbatches.
        """
        transfers = model.overlap_communication, model.transfers_in_turn, model.transfer_share
        return _made(device_of_stage(names), model.schedule, model.microbatches, *transfers)

    def _add_ends(self, tasks: Sequence[Task], overlap: bool) -> None:
        """The all-reduce of each stage's gradients and its state's way; see Note [Tails], and ``costs``."""
        for stages in self.stages_of:
            last = {task.action.stage: index for index, task in enumerate(tasks) if not task.transfer}
            done = max(last[stage] for stage in stages)
            before: tuple[int, ...] = ()
            for stage in sorted(stages, key=lambda one: last[one]):
                ends = []
                if overlap and tasks[last[stage]].action.kind == BACKWARD:
                    ends.append(self._add(TAIL, stage, (last[stage],)))
                    if before:
                        ends.append(self._add(REDUCE, stage, before))
                else:
                    ends.append(self._add(REDUCE, stage, (last[stage] if overlap else done, *before)))
                before = tuple(ends)
            before = (*before, done)
            for stage in stages:
                before = (self._add(UPDATE, stage, before),)

    def _add(self, row: int, stage: int, needs: tuple[int, ...]) -> int:
        self._nodes.append(_Node(row, stage, needs))
        return len(self._nodes) - 1

    def times_us(self, rows: Array) -> Array:
        """The time of each of many steps.

        Args:
            rows: times by row, stage, and step.
        """
        rows, shape = self._slowed(rows), rows.shape[2]
        chunks = [rows[:, :, start : start + _MOST_AT_ONCE] for start in range(0, shape, _MOST_AT_ONCE)]
        return np.concatenate([self._latest(chunk) for chunk in chunks]) if chunks else np.zeros(0)

    def _latest(self, rows: Array) -> Array:
        ends: list[Array] = []
        latest = np.zeros(rows.shape[2])
        for node in self._nodes:
            if not node.needs:
                ends.append(rows[node.row, node.stage])
                continue
            start = ends[node.needs[0]]
            for one in node.needs[1:]:
                start = np.maximum(start, ends[one])
            ends.append(start + rows[node.row, node.stage])
            if node.row == UPDATE:
                latest = np.maximum(latest, ends[-1])
        return latest

    def path(self, rows: Array, more_us: Mapping[Action, float] | None = None) -> tuple[float, Array]:
        """The time of one step, and how often its longest path passes each row of each stage.

        Args:
            rows: times by row and stage.
            more_us: by which actions are longer than these say.
        """
        times: list[float] = self._slowed(rows)[self._rows, self._stages].tolist()
        for action, added_us in (more_us or {}).items():
            times[self._at[action]] += added_us
        ends: list[float] = []
        origin: list[int] = []
        for time_us, needs in zip(times, self._needs, strict=True):
            before, start = -1, 0.0
            for one in needs:
                if before < 0 or ends[one] > start:
                    before, start = one, ends[one]
            ends.append(start + time_us)
            origin.append(before)
        at = ends.index(max(ends))
        step_us, passes = ends[at], np.zeros(rows.shape)
        while at >= 0:
            passes[self._rows[at], self._stages[at]] += 1
            at = origin[at]
        for computing, transfers in self._slowed_rows:
            passes[transfers, :-1] += self._transfer_share * (passes[computing, :-1] + passes[computing, 1:])
        return step_us, passes

    def _slowed(self, rows: Array) -> Array:
        """The same times, where computing is longer for the transfers at both borders of a stage."""
        if not self._transfer_share:
            return rows
        rows = rows.copy()
        for computing, transfers in self._slowed_rows:
            more_us = self._transfer_share * rows[transfers, :-1]
            rows[computing, :-1] += more_us
            rows[computing, 1:] += more_us
        return rows

    def rest_share(self, model: CostModel) -> float:
        """The part of the step in which a device rests, where all stages take equally long and transfers no time."""
        rows = np.zeros((ROWS, len(self.in_flight)))
        rows[FORWARDS], rows[BACKWARDS] = 1.0, 2.0
        if splits_backward(model.schedule):  # the first stage's is one of weights
            rows[BACKWARDS] = rows[WEIGHTS] = 1.0
            rows[BACKWARDS, 0], rows[WEIGHTS, 0] = 0.0, 2.0
        return bubble_of(rows, self.path(rows)[0], model.microbatches, len(self.stages_of))

    def memory_bytes(self, device: int, needs: Mapping[int, StageNeed]) -> Any:
        """What a device takes at the worst moment of its stages, in one partition or in many."""
        peak: Any = 0.0
        for moment in self.moments[device]:
            pairs = zip(self.stages_of[device], moment.held, strict=True)
            flying = sum(needs[stage].bytes_of(count) for stage, count in pairs)
            peak = np.maximum(peak, flying + needs[moment.running].working_bytes(moment))
        return sum(needs[stage].static_bytes for stage in self.stages_of[device]) + peak


@lru_cache(maxsize=64)
def _made(
    devices: tuple[int, ...], schedule: str, microbatches: int, overlap: bool, in_turn: bool, transfer_share: float
) -> TrainingStep:
    model = CostModel(
        schedule=schedule,
        microbatches=microbatches,
        overlap_communication=overlap,
        transfers_in_turn=in_turn,
        transfer_share=transfer_share,
    )
    return TrainingStep(devices, model)


def _schedule(devices: tuple[int, ...], model: CostModel) -> Schedule:
    """A rank for each device; where the rule has one for each stage, those of one device take turns."""
    stages, ranks = len(devices), 1 + max(devices)
    try:
        if model.schedule in ONE_STAGE_EACH:
            made = make_schedule(model.schedule, ranks=stages, stages=stages, microbatches=model.microbatches)
            return made if ranks == stages else on_ranks(made, devices)
        made = make_schedule(model.schedule, ranks=ranks, stages=stages, microbatches=model.microbatches)
    except PipelineError as error:
        raise PartitionError(
            f"expected devices and microbatches for schedule {model.schedule!r}, found: {error}"
        ) from None
    if devices != tuple(stage % ranks for stage in range(stages)):
        raise PartitionError(
            f"expected the {ranks} devices in turn for schedule {model.schedule!r}, stage s on device s % {ranks}, "
            f"found the stages on devices {', '.join(map(str, devices))}; name them in the same order again and again"
        )
    return made


def _node(task: Task) -> _Node:
    stage, kind = task.action.stage, task.action.kind
    if task.transfer:
        return _Node(*((SEND, stage) if kind == FORWARD else (BACK, stage - 1)), task.needs)
    return _Node(row_of(kind), stage, task.needs)


def row_of(kind: str) -> int:
    """The row of what an action of a kind takes."""
    return {FORWARD: FORWARDS, WEIGHT_BACKWARD: WEIGHTS}.get(kind, BACKWARDS)


def unit_times_us(units: Units, model: CostModel, stage: int) -> Array:
    """What each unit takes in a stage, on a device of speed 1: the first `COMPUTED` rows."""
    if not splits_backward(model.schedule):
        return np.stack([units.forward_us, units.backward_us, np.zeros(len(units))])
    if stage == 0:  # nobody asks for the gradients of its inputs
        return np.stack([units.forward_us, np.zeros(len(units)), units.backward_us])
    return np.stack([units.forward_us, *units.two_parts_us(model.input_backward_share)])


def add_to_backwards(rows: Array, model: CostModel, stage: int, added_us: Any) -> None:
    """Adds what the backwards of a stage take longer, for each microbatch."""
    for row, share in zip((BACKWARDS, WEIGHTS), model.relief_shares(stage), strict=True):
        rows[row, stage] += share * added_us
