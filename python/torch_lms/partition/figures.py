"""What a partition will take: the time and the memory of each stage, the bytes over each border, the step's time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torch_lms.partition.costs import CostModel, DeviceSpec, LinkSpec
from torch_lms.partition.relief import StageNeed
from torch_lms.partition.units import MODEL_INPUT, Units, Value

__all__ = ["Figures", "Step", "measure", "step_time"]

Ints = NDArray[np.int64]
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step's time and what makes it; see Note [Step time] in ``costs``."""

    step_us: float
    period_us: float
    bubble: float


@dataclass(frozen=True, kw_only=True)
class Figures:
    """A partition's costs, each a tuple over the stages, or over the borders between them.

    Attributes:
        stage_forward_us: of one microbatch, on the stage's device.
        stage_backward_us: as ``stage_forward_us``.
        stage_time_us: both, with what relief adds.
        stage_memory_bytes: with what relief takes away.
        usable_bytes: of each stage's device.
        cut_forward_bytes: over each border.
        cut_backward_bytes: over each border.
        step: of all microbatches.
    """

    stage_forward_us: tuple[float, ...]
    stage_backward_us: tuple[float, ...]
    stage_time_us: tuple[float, ...]
    stage_memory_bytes: tuple[int, ...]
    usable_bytes: tuple[float, ...]
    cut_forward_bytes: tuple[int, ...]
    cut_backward_bytes: tuple[int, ...]
    step: Step

    @property
    def fits(self) -> bool:
        """Whether every stage fits its device."""
        return not self.over()

    def over(self) -> list[int]:
        """The stages that do not fit."""
        pairs = zip(self.stage_memory_bytes, self.usable_bytes, strict=True)
        return [stage for stage, (need, usable) in enumerate(pairs) if need > usable * (1 + _ROUNDING)]


def measure(
    units: Units, stage_of_unit: Ints, devices: Sequence[DeviceSpec], links: Sequence[LinkSpec], model: CostModel
) -> Figures:
    """The figures of units placed on stages; ``devices`` in stage order, ``links[i]`` after stage i."""
    stages = len(devices)
    speeds = np.array([device.speed for device in devices])
    forward = np.bincount(stage_of_unit, weights=units.forward_us, minlength=stages) / speeds
    backward = np.bincount(stage_of_unit, weights=units.backward_us, minlength=stages) / speeds
    held, cut_forward, cut_backward = _held_and_sent(units, stage_of_unit, stages)
    static = _static_bytes(units, stage_of_unit, stages, model)
    transient = np.zeros(stages)
    np.maximum.at(transient, stage_of_unit, units.transient_bytes)
    times, memories = [], []
    for stage, device in enumerate(devices):
        need = StageNeed(
            time_us=np.asarray(forward[stage] + backward[stage]),
            static_bytes=np.asarray(static[stage]),
            held_bytes=np.asarray(held[stage]),
            transient_bytes=np.asarray(transient[stage]),
            in_flight=model.in_flight(stage, stages),
        )
        time_us, memory = model.relief.relieve(need, model.usable_bytes(device))
        times.append(float(time_us))
        memories.append(int(np.ceil(memory)))
    return Figures(
        stage_forward_us=tuple(map(float, forward)),
        stage_backward_us=tuple(map(float, backward)),
        stage_time_us=tuple(times),
        stage_memory_bytes=tuple(memories),
        usable_bytes=tuple(model.usable_bytes(device) for device in devices),
        cut_forward_bytes=tuple(map(int, cut_forward)),
        cut_backward_bytes=tuple(map(int, cut_backward)),
        step=step_time(forward, np.array(times) - forward, cut_forward, cut_backward, links, model),
    )


def step_time(
    forward_us: NDArray[np.float64],
    backward_us: NDArray[np.float64],
    cut_forward: Sequence[float] | Ints,
    cut_backward: Sequence[float] | Ints,
    links: Sequence[LinkSpec],
    model: CostModel,
) -> Step:
    """A step's time, its period and its bubble, by Note [Step time] in ``costs``."""
    send = np.array([link.transfer_us(nbytes) for link, nbytes in zip(links, cut_forward, strict=True)])
    back = np.array([link.transfer_us(nbytes) for link, nbytes in zip(links, cut_backward, strict=True)])
    work = forward_us + backward_us
    if model.overlap_communication:
        slow_forward = np.concatenate([forward_us, send])
        slow_backward = np.concatenate([backward_us, back])
        slow_both = np.concatenate([work, send, back])
    else:
        slow_forward = forward_us + np.concatenate([[0.0], send])
        slow_backward = backward_us + np.concatenate([back, [0.0]])
        slow_both = slow_forward + slow_backward
    turns_once = model.schedule == "gpipe"
    period = float(slow_forward.max() + slow_backward.max() if turns_once else slow_both.max())
    step = float(work.sum() + send.sum() + back.sum()) + (model.microbatches - 1) * period
    busy = model.microbatches * float(work.sum())
    bubble = 1 - busy / (len(work) * step) if step > 0 else 0.0
    return Step(step_us=step, period_us=period, bubble=bubble)


def _held_and_sent(units: Units, stage_of_unit: Ints, stages: int) -> tuple[NDArray[np.float64], list[int], list[int]]:
    """Bytes that each stage keeps of one microbatch, and bytes over each border forward and backward."""
    saved: list[set[str]] = [set() for _ in range(stages)]
    for index, node in enumerate(units.nodes):
        saved[stage_of_unit[index]].update(node.saved)
    sizes = units.graph.storage_bytes
    held = np.array([sum(sizes[id_] for id_ in ids) for ids in saved], dtype=np.float64)
    cut_forward, cut_backward = [0] * (stages - 1), [0] * (stages - 1)
    for value in units.values:
        readers = {stages - 1 if user == len(units) else int(stage_of_unit[user]) for user in value.consumers}
        first = min(readers) if value.producer == MODEL_INPUT else int(stage_of_unit[value.producer])
        last = max(readers)
        keepers = _keepers(value, first, last, readers, len(units))
        for stage in keepers:
            if not any(id_ in saved[stage] for id_ in value.storages):
                held[stage] += value.forward_bytes
        if value.producer == MODEL_INPUT:
            continue
        for border in range(first, last):
            cut_forward[border] += value.forward_bytes
            cut_backward[border] += value.backward_bytes
    return held, cut_forward, cut_backward


def _keepers(value: Value, first: int, last: int, readers: set[int], end: int) -> Iterable[int]:
    """The stages that keep a value because it comes in or goes out; a value within one stage is none of these."""
    if value.producer == MODEL_INPUT:
        return readers
    return range(first, last + 1) if first < last or end in value.consumers else ()


def _static_bytes(units: Units, stage_of_unit: Ints, stages: int, model: CostModel) -> NDArray[np.float64]:
    costs = model.parameter_cost_bytes(units.graph)
    names: list[set[str]] = [set() for _ in range(stages)]
    for index, parameters in enumerate(units.parameters):
        names[stage_of_unit[index]].update(parameters)
    return np.array([sum(costs[name] for name in stage) for stage in names], dtype=np.float64)
