"""What a partition will take: the time and the memory of each stage and device, the bytes over borders, the step."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from torch_lms.partition.costs import CostModel, DeviceSpec
from torch_lms.partition.device_step import Part, RelievedDevice, StageWork, relieve
from torch_lms.partition.link_spec import LinkSpec
from torch_lms.partition.offers import NO_OFFERS, Offers
from torch_lms.partition.relief import KEEP_ALL, StageNeed, StageRelief, relieve_device
from torch_lms.partition.segments import RUNS, graph_order, offers_in
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
    bubble_of,
    row_of,
    unit_times_us,
)
from torch_lms.partition.units import MODEL_INPUT, Units, Value
from torch_lms.partition.weight_gradients import WeightGradients
from torch_lms.schedules.rules import splits_backward
from torch_lms.schedules.traffic import StageTimes

__all__ = ["Figures", "Step", "measure"]

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step's time, and the share of it in which devices do not compute; see Note [Step time] in ``costs``."""

    step_us: float
    bubble: float


@dataclass(frozen=True, kw_only=True)
class _OfStages:
    """The part of `Figures` that `_of_stages` knows."""

    stage_forward_us: tuple[float, ...]
    stage_backward_us: tuple[float, ...]
    stage_weights_us: tuple[float, ...]
    stage_time_us: tuple[float, ...]
    stage_memory_bytes: tuple[int, ...]
    cut_forward_us: tuple[float, ...]
    cut_backward_us: tuple[float, ...]
    device_time_us: tuple[float, ...]
    stage_relief: tuple[StageRelief, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Figures(_OfStages):
    """A partition's costs, each a tuple over the stages, the borders between them, or the devices.

    Attributes:
        stage_forward_us: of one microbatch, on the stage's device.
        stage_backward_us: as ``stage_forward_us``, with what relief adds.
        stage_weights_us: of that, zero bubble's backward of weights; 0 where backwards are not in two parts.
        stage_time_us: forward and backward.
        stage_memory_bytes: at its own worst moment, with what relief takes away.
        cut_forward_bytes: over each border.
        cut_backward_bytes: over each border.
        cut_forward_us: as ``cut_forward_bytes``, the time of the transfer.
        cut_backward_us: as ``cut_backward_bytes``.
        device_names: each once, in the order of their first stages.
        device_stages: the stages of each device.
        device_time_us: of one microbatch in all its stages.
        device_memory_bytes: at the worst moment of all its stages together.
        usable_bytes: of each device.
        step: of all microbatches.
        transfers_in_turn: whether a device has one at a time.
        stage_relief: what each stage gives up to fit; empty where none does.
    """

    cut_forward_bytes: tuple[int, ...]
    cut_backward_bytes: tuple[int, ...]
    device_names: tuple[str, ...]
    device_stages: tuple[tuple[int, ...], ...]
    device_memory_bytes: tuple[int, ...]
    usable_bytes: tuple[float, ...]
    step: Step
    transfers_in_turn: bool = False

    @property
    def times_us(self) -> StageTimes:
        """Of each stage its forward, its backward, and of that the backward of weights."""
        return self.stage_forward_us, self.stage_backward_us, self.stage_weights_us

    @property
    def fits(self) -> bool:
        """Whether every device has room for its stages."""
        return not self.over()

    def over(self) -> list[int]:
        """The devices without room, by their place in ``device_names``."""
        pairs = zip(self.device_memory_bytes, self.usable_bytes, strict=True)
        return [device for device, (need, usable) in enumerate(pairs) if need > usable * (1 + _ROUNDING)]

    @property
    def excess_bytes(self) -> float:
        """What all devices together miss."""
        pairs = zip(self.device_memory_bytes, self.usable_bytes, strict=True)
        return sum(max(need - usable, 0.0) for need, usable in pairs)


def measure(
    units: Units,
    stage_of_unit: Ints,
    devices: Sequence[DeviceSpec],
    links: Sequence[LinkSpec],
    model: CostModel,
    *,
    simulated: bool = False,
) -> Figures:
    """The figures of units placed on stages; ``devices`` in stage order, ``links[i]`` after stage i.

    What devices give up is only estimated unless it is to be simulated: see Note [Two looks] in ``relief``.
    """
    stages = len(devices)
    step = TrainingStep.of([device.name for device in devices], model)
    usable = [model.usable_bytes(devices[own[0]]) for own in step.stages_of]
    rows = np.zeros((ROWS, stages))
    speeds = np.array([device.speed for device in devices])
    first, others = (unit_times_us(units, model, stage) for stage in (0, 1))
    unit_times = np.where(stage_of_unit == 0, first, others)
    rows[:COMPUTED] = [np.bincount(stage_of_unit, weights=times, minlength=stages) / speeds for times in unit_times]
    cut_forward, cut_backward = _sent(units, stage_of_unit, stages)
    memory = _Memory(units, stage_of_unit, speeds, unit_times, (cut_forward, cut_backward), model)
    found = [
        _relieved(device, step, memory, rows, usable[device], model, simulated=simulated)
        for device in range(len(usable))
    ]
    more_us = {action: added_us for one in found for action, added_us in one.more_us.items()}
    for row, nbytes_over in ((SEND, cut_forward), (BACK, cut_backward)):
        rows[row, :-1] = [link.transfer_us(nbytes) for link, nbytes in zip(links, nbytes_over, strict=True)]
    rows[REDUCE] = model.data_parallel.all_reduce_us(memory.gradients)
    rows[TAIL] = model.data_parallel.tail_us(memory.gradients, rows[REDUCE], rows[BACKWARDS])
    rows[UPDATE] = memory.optimizer_us + model.update_us(memory.states)
    expected = rows.copy()
    for action, added_us in more_us.items():
        expected[row_of(action.kind), action.stage] += added_us / model.microbatches
    step_us, _ = (step.expecting(expected) if simulated else step).path(rows, more_us)
    rows = expected
    return Figures(
        **vars(_of_stages(step, rows, found)),
        cut_forward_bytes=tuple(map(int, cut_forward)),
        cut_backward_bytes=tuple(map(int, cut_backward)),
        device_names=tuple(dict.fromkeys(device.name for device in devices)),
        device_stages=step.stages_of,
        device_memory_bytes=tuple(one.memory_bytes for one in found),
        usable_bytes=tuple(usable),
        step=Step(step_us=step_us, bubble=bubble_of(rows, step_us, model.microbatches, len(step.stages_of))),
        transfers_in_turn=model.transfers_in_turn,
    )


def _of_stages(step: TrainingStep, rows: Array, found: Sequence[RelievedDevice]) -> _OfStages:
    """What `Figures` says of stages and borders, and the times of devices, which are their sums."""
    of_stage = {stage: found[device] for device, own in enumerate(step.stages_of) for stage in own}
    relief = tuple(of_stage[stage].stage_relief[stage] for stage in sorted(of_stage))
    backward = rows[BACKWARDS] + rows[WEIGHTS]
    work = rows[FORWARDS] + backward
    return _OfStages(
        stage_forward_us=tuple(rows[FORWARDS].tolist()),
        stage_backward_us=tuple(backward.tolist()),
        stage_weights_us=tuple(rows[WEIGHTS].tolist()),
        stage_time_us=tuple(work.tolist()),
        stage_memory_bytes=tuple(of_stage[stage].stage_memory_bytes[stage] for stage in sorted(of_stage)),
        cut_forward_us=tuple(rows[SEND, :-1].tolist()),
        cut_backward_us=tuple(rows[BACK, :-1].tolist()),
        device_time_us=tuple(float(work[list(own)].sum()) for own in step.stages_of),
        stage_relief=relief if any(relief) else (),
    )


def _relieved(
    device: int,
    step: TrainingStep,
    memory: _Memory,
    rows: Array,
    usable_bytes: float,
    model: CostModel,
    *,
    simulated: bool,
) -> RelievedDevice:
    """What the stages of a device give up; an estimate of its cost goes to their backwards in ``rows``."""
    own = step.stages_of[device]
    needs = {stage: memory.need(stage, rows[:COMPUTED, stage], step) for stage in own}
    together = step.memory_bytes(device, needs)
    if simulated and model.relief is not KEEP_ALL and together > usable_bytes:
        works = [memory.works(needs, size) for size in range(1 + len(RUNS))]
        return relieve(model.relief, step.schedule.ranks[device], works, usable_bytes)
    relieved, together = relieve_device(model.relief, list(needs.values()), together, usable_bytes)
    for stage, one in zip(own, relieved, strict=True):
        add_to_backwards(rows, model, stage, one.time_us - needs[stage].time_us)
    return RelievedDevice(
        memory_bytes=int(np.ceil(together)),
        more_us={},
        stage_memory_bytes={stage: int(np.ceil(one.memory_bytes)) for stage, one in zip(own, relieved, strict=True)},
        stage_relief=dict.fromkeys(own, StageRelief()),
    )


class _Memory:
    """What each stage keeps, by what it is for."""

    def __init__(
        self,
        units: Units,
        stage_of_unit: Ints,
        speeds: Array,
        unit_times: Array,
        cut_bytes: tuple[Sequence[int], Sequence[int]],
        model: CostModel,
    ) -> None:
        stages, self._speeds = len(speeds), speeds
        self._units, self._stage_of_unit, self._relieves = units, stage_of_unit, model.relief is not KEEP_ALL
        self._names: list[set[str]] = [set() for _ in range(stages)]
        for index, parameters in enumerate(units.parameters):
            self._names[stage_of_unit[index]].update(parameters)
        self._times = unit_times
        saved: list[set[str]] = [set() for _ in range(stages)]
        for index, node in enumerate(units.nodes):
            saved[stage_of_unit[index]].update(node.saved)
        self._outputs_stay = model.outputs_stay
        self.held = self._held(saved)
        self.kept, self.freed, self.input_transient = np.zeros(stages), np.zeros(stages), np.zeros(stages)
        if splits_backward(model.schedule):
            self._split(cut_bytes[1])
        self.static = self._sums(model.parameter_cost_bytes(units.graph))
        self.gradients = self._sums(model.gradient_bytes(units.graph))
        self.states = self._sums(model.optimizer_state_bytes(units.graph))
        self.optimizer_us = self._sums(units.graph.optimizer_us or {}) / speeds
        self.transient = np.zeros(stages)
        np.maximum.at(self.transient, stage_of_unit, units.transient_bytes)
        on_the_way = np.array([0.0, *np.sum(cut_bytes, axis=0)])
        self.transient, self.input_transient = self.transient + on_the_way, self.input_transient + on_the_way

    def _split(self, cut_backward: Sequence[int]) -> None:
        """What a microbatch has that is half done; see Note [Half done] in ``moments``."""
        gradients = WeightGradients(self._units, self._stage_of_unit)
        self.kept[:-1] += cut_backward
        self.kept[1:] += cut_backward
        of_unit = np.zeros(len(self._units))
        for one in gradients.meetings():
            if one.after < one.at <= one.until:
                of_unit[one.unit] += one.nbytes
        before = np.zeros(len(self.held))
        for unit, stage in enumerate(self._stage_of_unit):
            own = min(of_unit[unit], self._units.nodes[unit].gradient_bytes)
            space = self._units.transient_bytes[unit] - own - before[stage]
            self.input_transient[stage] = max(self.input_transient[stage], space)
            before[stage] += of_unit[unit]
        self.kept += before
        stays_after = gradients.stays_after()
        left: list[set[str]] = [set() for _ in self.held]
        for node in self._units.graph.nodes:
            stage = stays_after.get(node.name)
            if stage is not None and stage == self._stage_of_unit[self._units.number_of(node.name)]:
                left[stage].update(node.saved)
        self.freed = np.maximum(self.held - self._held(left), 0.0)
        self.freed[0] = 0.0

    def need(self, stage: int, times_us: Array, step: TrainingStep) -> StageNeed:
        """Of one stage, with the times of what it computes."""
        return StageNeed(
            time_us=times_us.sum(),
            forward_us=times_us[0],
            speed=float(self._speeds[stage]),
            offers=self._offers(stage, 1),
            coarser=tuple(self._offers(stage, length) for length in RUNS),
            end=1,
            static_bytes=np.asarray(self.static[stage]),
            held_bytes=np.asarray(self.held[stage]),
            transient_bytes=np.asarray(self.transient[stage]),
            kept_bytes=np.asarray(self.kept[stage]),
            freed_bytes=np.asarray(self.freed[stage]),
            input_transient_bytes=np.asarray(self.input_transient[stage]),
            in_flight=step.in_flight[stage],
            moments=step.alone[stage],
            replays=step.replays,
            half_done=step.half_done[stage],
        )

    def _offers(self, stage: int, length: int) -> Offers:
        return offers_in(self._units, self._stage_of_unit, stage, length) if self._relieves else NO_OFFERS

    def works(self, needs: Mapping[int, StageNeed], size: int) -> dict[int, StageWork]:
        """What stages do where they may give up their segments (0), or runs of the first length, or of another."""
        return {
            stage: self._work(stage, replace(need, offers=(need.offers, *need.coarser)[size]))
            for stage, need in needs.items()
        }

    def _work(self, stage: int, need: StageNeed) -> StageWork:
        """What a stage does, in the order of its code."""
        segment_of = {unit: number for number, one in enumerate(need.offers.segments) for unit in one.units}
        order = [int(unit) for unit in graph_order(self._units) if self._stage_of_unit[unit] == stage]
        parts = []
        for segment, run in itertools.groupby(order, key=segment_of.get):
            forward, backward, weights = (self._times[:, list(run)].sum(axis=1) / need.speed).tolist()
            parts.append(Part(forward_us=forward, backward_us=backward, weights_us=weights, segment=segment))
        return StageWork(parts=tuple(parts), need=need)

    def _held(self, saved: Sequence[set[str]]) -> Array:
        """Bytes that each stage keeps of one microbatch: of what is saved, by stage, and of what crosses borders."""
        units, stages = self._units, len(saved)
        held = np.array([sum(units.graph.storage_bytes[id_] for id_ in ids) for ids in saved], dtype=np.float64)
        for value in units.values:
            first, last, readers = _way(value, self._stage_of_unit, stages)
            stays = self._outputs_stay and len(units) in value.consumers
            for stage in _keepers(value, first, last, readers, stays):
                if not any(id_ in saved[stage] for id_ in value.storages):
                    held[stage] += value.forward_bytes
        return held

    def _sums(self, sizes: Mapping[str, float]) -> Array:
        return np.array([sum(sizes.get(name, 0.0) for name in names) for names in self._names], dtype=np.float64)


def _sent(units: Units, stage_of_unit: Ints, stages: int) -> tuple[list[int], list[int]]:
    """Bytes over each border, forward and backward."""
    cut_forward, cut_backward = [0] * (stages - 1), [0] * (stages - 1)
    for value in units.values:
        first, last, _ = _way(value, stage_of_unit, stages)
        for border in range(first, last) if value.producer != MODEL_INPUT else ():
            cut_forward[border] += value.forward_bytes
            cut_backward[border] += value.backward_bytes
    return cut_forward, cut_backward


def _way(value: Value, stage_of_unit: Ints, stages: int) -> tuple[int, int, set[int]]:
    """The first and the last stage of a value, and those that read it."""
    end = len(stage_of_unit)
    readers = {stages - 1 if user == end else int(stage_of_unit[user]) for user in value.consumers}
    return min(readers) if value.producer == MODEL_INPUT else int(stage_of_unit[value.producer]), max(readers), readers


def _keepers(value: Value, first: int, last: int, readers: set[int], stays: bool) -> Iterable[int]:
    """The stages that keep a value because it comes in or goes out; a value within one stage is none of these."""
    if value.producer == MODEL_INPUT:
        return readers
    return range(first, last + 1) if first < last or stays else ()
