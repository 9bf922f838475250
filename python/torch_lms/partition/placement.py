"""Units on stages, with all that a move of one of them to a neighbouring stage changes kept up to date.

Fiduccia and Mattheyses' nets are the values here: one maker, some readers, and a weight in bytes. A value goes over
each border between its maker's stage and its last reader's. A move onward is allowed if no reader of the unit's values
stays behind, a move back if no maker of what it reads does. Then what a move changes is known without looking at the
neighbours:

- onward, the unit's own values go over one border less, and what it reads over one more, where no other reader of it is
  in a later stage;
- back, the unit's own values go over one border more, and what it reads over one less, where it is the only reader in
  the last stage of its readers.

So a unit's gains follow from three sums of bytes. A reader's sums change only with its value's last stage, or when one
reader is left there or joined there. In a pass, where each unit moves once and by one stage, that happens a few times
for each value (their "critical nets"), so all updates together are linear in the number of pins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torch_lms.partition.costs import DeviceSpec
from torch_lms.partition.interface import PartitionProblem
from torch_lms.partition.units import MODEL_INPUT

__all__ = ["Move", "Placement", "Progress"]

Ints = NDArray[np.int64]
Bytes = list[list[int]]


class Move(NamedTuple):
    """A unit's way over one border."""

    unit: int
    source: int
    target: int


class Progress(NamedTuple):
    """How good a placement is: the step's time, then how even the stages are."""

    step_us: float
    squares: float


class Placement:
    """See the module.

    Attributes:
        stage: of each unit.
        count: of units in each stage.
        forward: bytes over each border.
        backward: bytes over each border.
        pins: readers and neighbours visited, so far.
    """

    def __init__(self, problem: PartitionProblem, stage_of_unit: Ints, devices: Sequence[DeviceSpec]) -> None:
        units = problem.units
        self._units = units
        self._model = problem.cost_model
        self._links = problem.links_between(devices)
        self._speeds = [device.speed for device in devices]
        self._times = [[float(time) for time in times] for times in (units.forward_us, units.backward_us)]
        self.stages = len(devices)
        self.stage = [int(stage) for stage in stage_of_unit]
        self.count = [0] * self.stages
        self._loads = [[0.0] * self.stages, [0.0] * self.stages]
        for unit, stage in enumerate(self.stage):
            self.count[stage] += 1
            for load, time in zip(self._loads, self._times, strict=True):
                load[stage] += time[unit] / self._speeds[stage]
        self.pins = 0
        self._users_here = [0] * len(units)
        self._inputs_here = [0] * len(units)
        for unit in range(len(units)):
            self._count_neighbours(unit)
        self._read_values()

    def _read_values(self) -> None:
        """Fills the books of values; the model's inputs never cross a border and have none."""
        count = len(self._units)
        self._values = [value for value in self._units.values if value.producer != MODEL_INPUT]
        self._weights = [(value.forward_bytes, value.backward_bytes) for value in self._values]
        self._readers = [[user for user in value.consumers if user < count] for value in self._values]
        self._read: list[list[int]] = [[] for _ in range(count)]
        self._made, self._ending, self._alone = ([[0, 0] for _ in range(count)] for _ in range(3))
        self._last = [(0, 0)] * len(self._values)
        self.forward, self.backward = [0] * (self.stages - 1), [0] * (self.stages - 1)
        for index, value in enumerate(self._values):
            for reader in self._readers[index]:
                self._read[reader].append(index)
            self._last[index] = self._find_last(index)
            for border in range(self.stage[value.producer], self._last[index][0]):
                self.forward[border] += value.forward_bytes
                self.backward[border] += value.backward_bytes
            _add(self._made[value.producer], self._weights[index], 1)
        for unit in range(count):
            self._sum_read(unit)

    def placed_array(self) -> Ints:
        """The stage of each unit."""
        return np.array(self.stage, dtype=np.int64)

    def targets(self, unit: int) -> list[int]:
        """The neighbouring stages that a unit may move to, next stage first."""
        stage = self.stage[unit]
        onward = [stage + 1] if stage + 1 < self.stages and not self._users_here[unit] else []
        return onward + ([stage - 1] if stage > 0 and not self._inputs_here[unit] else [])

    def gain(self, unit: int, target: int) -> int:
        """The bytes that a move saves over its border, both ways."""
        return -sum(self._change(unit, target))

    def progress(self, move: Move | None = None) -> Progress:
        """Of the placement as it is, or after a move.

        An estimate that a move changes quickly: the first microbatch passes all stages and back, and each further one
        leaves the slowest place a period later. What a schedule truly takes says ``figures.measure``.
        """
        loads, forward, backward = self._loads, self.forward, self.backward
        if move is not None:
            loads, forward, backward = [list(load) for load in loads], forward.copy(), backward.copy()
            self._shift(loads, move)
            border, change = min(move.source, move.target), self._change(move.unit, move.target)
            forward[border] += change[0]
            backward[border] += change[1]
        send = [link.transfer_us(nbytes) for link, nbytes in zip(self._links, forward, strict=True)]
        back = [link.transfer_us(nbytes) for link, nbytes in zip(self._links, backward, strict=True)]
        waits_forward, waits_backward = loads
        if not self._model.overlap_communication:
            waits_forward = [load + wait for load, wait in zip(loads[0], [0.0, *send], strict=True)]
            waits_backward = [load + wait for load, wait in zip(loads[1], [*back, 0.0], strict=True)]
        waits = [one + other for one, other in zip(waits_forward, waits_backward, strict=True)]
        if self._model.schedule == "gpipe":
            period = max([*waits_forward, *send]) + max([*waits_backward, *back])
        else:
            period = max([*waits, *send, *back])
        step_us = sum(loads[0]) + sum(loads[1]) + sum(send) + sum(back) + (self._model.microbatches - 1) * period
        return Progress(step_us, sum(wait * wait for wait in waits))

    def make(self, move: Move) -> set[int]:
        """Moves a unit; returns it and the units whose gains or targets may have changed."""
        unit, source, target = move
        sent, returned = self._change(unit, target)
        border = min(source, target)
        self.forward[border] += sent
        self.backward[border] += returned
        self._shift(self._loads, move)
        self.count[source] -= 1
        self.count[target] += 1
        self.stage[unit] = target
        touched = {unit}
        for index in self._read[unit]:
            self._move_reader(index, move, touched)
        self._sum_read(unit)
        for neighbours, here in (
            (self._units.inputs[unit], self._users_here),
            (self._units.users[unit], self._inputs_here),
        ):
            for neighbour in neighbours:
                here[neighbour] += (self.stage[neighbour] == target) - (self.stage[neighbour] == source)
                touched.add(neighbour)
        self._count_neighbours(unit)
        return touched

    def undo(self, moves: Sequence[Move]) -> None:
        """Takes moves back, the last first."""
        for move in reversed(moves):
            self.make(Move(move.unit, move.target, move.source))

    def _change(self, unit: int, target: int) -> list[int]:
        """What a move adds to the bytes over its border, forward and backward."""
        if target > self.stage[unit]:
            return [more - less for more, less in zip(self._ending[unit], self._made[unit], strict=True)]
        return [more - less for more, less in zip(self._made[unit], self._alone[unit], strict=True)]

    def _shift(self, loads: list[list[float]], move: Move) -> None:
        for load, time in zip(loads, self._times, strict=True):
            load[move.source] -= time[move.unit] / self._speeds[move.source]
            load[move.target] += time[move.unit] / self._speeds[move.target]

    def _move_reader(self, index: int, move: Move, touched: set[int]) -> None:
        """Keeps a value's last stage after a reader's move, and the sums of the other readers where it is critical."""
        before = last, count = self._last[index]
        if move.target > last:
            after = (move.target, 1)
        elif move.target == last:
            after = (last, count + 1)
        elif move.source == last and count == 1:
            after = self._find_last(index)
        else:
            after = (last, count - (move.source == last))
        self._last[index] = after
        if before[0] == after[0] and (count == 1) == (after[1] == 1):
            return
        for reader in self._readers[index]:
            self.pins += 1
            if reader != move.unit:
                self._count_value(reader, index, before, -1)
                self._count_value(reader, index, after, 1)
                touched.add(reader)

    def _count_value(self, reader: int, index: int, last: tuple[int, int], sign: int) -> None:
        """Adds a value to, or takes it out of, the sums of a reader."""
        if self.stage[reader] == last[0]:
            _add(self._ending[reader], self._weights[index], sign)
            if last[1] == 1:
                _add(self._alone[reader], self._weights[index], sign)

    def _sum_read(self, unit: int) -> None:
        self._ending[unit], self._alone[unit] = [0, 0], [0, 0]
        for index in self._read[unit]:
            self.pins += 1
            self._count_value(unit, index, self._last[index], 1)

    def _find_last(self, index: int) -> tuple[int, int]:
        """The last stage that reads a value, and how many readers are there; the model's output is with the last."""
        stages = [self.stage[reader] for reader in self._readers[index]]
        stages += [self.stages - 1] * (len(self._values[index].consumers) - len(stages))
        self.pins += len(stages)
        return max(stages), stages.count(max(stages))

    def _count_neighbours(self, unit: int) -> None:
        stage, users, inputs = self.stage[unit], self._units.users[unit], self._units.inputs[unit]
        self.pins += len(users) + len(inputs)
        self._users_here[unit] = sum(self.stage[user] == stage for user in users)
        self._inputs_here[unit] = sum(self.stage[source] == stage for source in inputs)


def _add(sums: list[int], weights: tuple[int, int], sign: int) -> None:
    sums[0] += sign * weights[0]
    sums[1] += sign * weights[1]
