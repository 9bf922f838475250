"""Fiduccia-Mattheyses refinement on the operator graph.

Source: Fiduccia and Mattheyses, "A linear-time heuristic for improving network partitions", DAC 1982, with more than
two parts in a row: a node may move to the next stage if none of its readers stays behind, and to the one before if
none of its inputs does, so no value ever goes back. In a pass the best move is made again and again, even if it makes
things worse, and its node is locked; then everything after the best moment is undone. Passes go on until one gains
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torch_lms.partition.bisection import lightest_cuts
from torch_lms.partition.costs import DeviceSpec
from torch_lms.partition.figures import measure
from torch_lms.partition.interface import Partition, PartitionProblem, evaluate
from torch_lms.partition.sequence import UnitSequence
from torch_lms.partition.units import MODEL_INPUT

__all__ = ["FiducciaMattheyses", "refine"]

Ints = NDArray[np.int64]
_MOST_MOVES = 3000
_PATIENCE = 48
_MOST_CHECKS = 6


class FiducciaMattheyses:
    """Cuts the graph's order into even times, then moves nodes over the borders."""

    name = "fm"
    source = "Fiduccia and Mattheyses, DAC 1982; several stages, forward only"

    def partition(self, problem: PartitionProblem) -> Partition:
        """See the class."""
        sequence = UnitSequence(problem.units)
        start = sequence.stages(lightest_cuts(problem.units.time_us, problem.stages))
        placed, moves = refine(problem, start, problem.devices)
        reason = f"even times, then {moves} moves over borders"
        return evaluate(problem, placed, algorithm=self.name, reason=reason)


def refine(problem: PartitionProblem, stage_of_unit: Ints, devices: Sequence[DeviceSpec]) -> tuple[Ints, int]:
    """Moves units over borders as long as a step gets shorter and everything still fits.

    Returns:
        Where each unit is, and how many moves were made.
    """
    state = _State(problem, stage_of_unit, devices)
    links = problem.links_between(devices)

    def over(placed: Ints) -> tuple[float, float]:
        figures = measure(problem.units, placed, devices, links, problem.cost_model)
        return figures.excess_bytes, figures.step.step_us

    best, kept = over(state.placed_array()), 0
    left = _MOST_MOVES
    while left > 0:
        moves, marks = _pass(state, left)
        left -= max(len(moves), 1)
        keep = 0
        for mark in marks[: -_MOST_CHECKS - 1 : -1]:
            state.undo(moves[mark:])
            del moves[mark:]
            now = over(state.placed_array())
            if now < best:
                best, keep = now, mark
                break
        state.undo(moves[keep:])
        kept += keep
        if keep == 0:
            break
    return state.placed_array(), kept


class _Move(NamedTuple):
    unit: int
    source: int
    target: int


class _Key(NamedTuple):
    """How good a state is: the step's time, then how even the stages are."""

    step_us: float
    squares: float


def _pass(state: _State, most: int) -> tuple[list[_Move], list[int]]:
    """One pass: all moves made, and after how many of them the state was better than ever."""
    moves: list[_Move] = []
    marks: list[int] = []
    locked: set[int] = set()
    best = state.key()
    while len(moves) < most and len(moves) - (marks[-1] if marks else 0) < _PATIENCE:
        tried = [(state.key_after(move), move) for move in state.possible() if move.unit not in locked]
        if not tried:
            break
        key, move = min(tried)
        state.make(move)
        moves.append(move)
        locked.add(move.unit)
        if key.step_us < best.step_us * (1 - 1e-9) or (
            key.step_us <= best.step_us * (1 + 1e-12) and key.squares < best.squares * (1 - 1e-9)
        ):
            best = key
            marks.append(len(moves))
    return moves, marks


class _State:
    """Units on stages, with what the key needs kept up to date."""

    def __init__(self, problem: PartitionProblem, stage_of_unit: Ints, devices: Sequence[DeviceSpec]) -> None:
        self.units = problem.units
        self.model = problem.cost_model
        self.links = problem.links_between(devices)
        self.speeds = [device.speed for device in devices]
        self.stage = [int(stage) for stage in stage_of_unit]
        self.time = [float(time_us) for time_us in self.units.time_us]
        self.stages = len(devices)
        self.load = [0.0] * self.stages
        self.count = [0] * self.stages
        for unit, stage in enumerate(self.stage):
            self.load[stage] += self.time[unit] / self.speeds[stage]
            self.count[stage] += 1
        self.made: list[list[int]] = [[] for _ in self.stage]
        self.read: list[list[int]] = [[] for _ in self.stage]
        self.forward = [0] * (self.stages - 1)
        self.backward = [0] * (self.stages - 1)
        for index, value in enumerate(self.units.values):
            if value.producer == MODEL_INPUT:
                continue
            self.made[value.producer].append(index)
            for user in value.consumers:
                if user < len(self.units):
                    self.read[user].append(index)
            for border in range(self.stage[value.producer], self._last(index)):
                self.forward[border] += value.forward_bytes
                self.backward[border] += value.backward_bytes
        self.movable = {unit for unit in range(len(self.stage)) if self._directions(unit)}

    def placed_array(self) -> Ints:
        """The stage of each unit."""
        return np.array(self.stage, dtype=np.int64)

    def possible(self) -> list[_Move]:
        """All valid moves."""
        moves = []
        for unit in self.movable:
            stage = self.stage[unit]
            if self.count[stage] > 1:
                moves += [_Move(unit, stage, target) for target in self._directions(unit)]
        return moves

    def key(self) -> _Key:
        """Of the state as it is."""
        return self._key(self.load, {})

    def key_after(self, move: _Move) -> _Key:
        """Of the state after a move."""
        load = self.load.copy()
        load[move.source] -= self.time[move.unit] / self.speeds[move.source]
        load[move.target] += self.time[move.unit] / self.speeds[move.target]
        return self._key(load, self._change(move))

    def make(self, move: _Move) -> None:
        """Moves a unit."""
        border = min(move.source, move.target)
        change = self._change(move).get(border, (0, 0))
        self.forward[border] += change[0]
        self.backward[border] += change[1]
        self.load[move.source] -= self.time[move.unit] / self.speeds[move.source]
        self.load[move.target] += self.time[move.unit] / self.speeds[move.target]
        self.count[move.source] -= 1
        self.count[move.target] += 1
        self.stage[move.unit] = move.target
        for unit in (move.unit, *self.units.inputs[move.unit], *self.units.users[move.unit]):
            if self._directions(unit):
                self.movable.add(unit)
            else:
                self.movable.discard(unit)

    def undo(self, moves: Sequence[_Move]) -> None:
        """Takes moves back, the last first."""
        for move in reversed(moves):
            self.make(_Move(move.unit, move.target, move.source))

    def _directions(self, unit: int) -> list[int]:
        stage = self.stage[unit]
        targets = []
        if stage + 1 < self.stages and all(self.stage[user] > stage for user in self.units.users[unit]):
            targets.append(stage + 1)
        if stage > 0 and all(self.stage[source] < stage for source in self.units.inputs[unit]):
            targets.append(stage - 1)
        return targets

    def _last(self, index: int, without: int = -1) -> int:
        end = len(self.units)
        consumers = self.units.values[index].consumers
        stages = [self.stages - 1 if user == end else self.stage[user] for user in consumers if user != without]
        return max(stages, default=-1)

    def _change(self, move: _Move) -> dict[int, tuple[int, int]]:
        """What a move changes over the one border that it crosses."""
        border = min(move.source, move.target)
        onward = move.target > move.source
        forward = backward = 0
        for index in self.made[move.unit]:
            if self._last(index) > border:
                sign = -1 if onward else 1
                forward += sign * self.units.values[index].forward_bytes
                backward += sign * self.units.values[index].backward_bytes
        for index in self.read[move.unit]:
            if self._last(index, without=move.unit) <= border:
                sign = 1 if onward else -1
                forward += sign * self.units.values[index].forward_bytes
                backward += sign * self.units.values[index].backward_bytes
        return {border: (forward, backward)}

    def _key(self, load: list[float], change: dict[int, tuple[int, int]]) -> _Key:
        waits = list(load)
        total = sum(load)
        slowest = 0.0
        for border, link in enumerate(self.links):
            more = change.get(border, (0, 0))
            send = link.transfer_us(self.forward[border] + more[0])
            back = link.transfer_us(self.backward[border] + more[1])
            total += send + back
            if self.model.overlap_communication:
                slowest = max(slowest, send, back)
            else:
                waits[border + 1] += send
                waits[border] += back
        period = max(slowest, *waits)
        return _Key(total + (self.model.microbatches - 1) * period, sum(time_us * time_us for time_us in waits))
