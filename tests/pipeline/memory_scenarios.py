"""Ranks that count their live bytes after each action of zero bubble, against what the planner says of the stages."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from tests.live_bytes import LiveBytes
from torch_lms.partition import CostGraph, CostModel, DeviceSpec, PartitionProblem
from torch_lms.partition.intervals import StageMatrices, stage_matrices
from torch_lms.partition.sequence import UnitSequence
from torch_lms.pipeline import runner
from torch_lms.pipeline.config import PipelineConfig
from torch_lms.pipeline.runner import Pipeline
from torch_lms.profile.profiler import ProfileConfig, profile
from torch_lms.profile.tracing import trace
from torch_lms.schedules import Action, Schedule
from torch_lms.schedules.traffic import expected_us, traffic_of
from torch_lms.stages.cutting import split

WIDTH, ROWS, MICROBATCHES = 64, 32, 6
VALUE = 4 * ROWS * WIDTH  # bytes of one that crosses a border
SCALARS = 64  # bytes for each microbatch in flight: tokens and losses


class Scored(nn.Module):
    """Linear layers, norms and activations of several widths; its last stage frees what its loss saved."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(
            *(nn.Linear(WIDTH, WIDTH), nn.GELU()),
            *(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH), nn.GELU()),
            *(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5 * WIDTH), nn.GELU(), nn.Linear(5 * WIDTH, 2 * WIDTH)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(x).tanh().square().mean()
        return loss


LETS_GO_OF_OUTPUTS = hasattr(PipelineStage, "release_fwd_send_outputs")  # once they are sent; PyTorch 2.15
STARTS = (0, 2, 7)  # of the stages, among the layers


@dataclass(frozen=True)
class Seen:
    """What was alive after an action, the microbatches in flight then, and how many actions of each kind had run."""

    kind: str
    now: Counter[str]
    done: Counter[str]
    live_bytes: int


class Recorder:
    """Of a stage, in place of its timeline."""

    def __init__(self, live: LiveBytes) -> None:
        self._live = live
        self.start()

    def start(self) -> None:
        """Before a step."""
        self._now: Counter[str] = Counter()
        self._done: Counter[str] = Counter()
        self.seen: list[Seen] = []

    def begin(self, action: Action) -> None:
        """Before it there is nothing to note."""

    def end(self, action: Action) -> None:
        """After it all is counted."""
        kind = action.kind
        self._now.update(all=(kind == "F") - (kind in "BW"), keeping=(kind == "I") - (kind == "W"))
        self._now.update(whole=(kind == "F") - (kind in "BI"))
        self._done[kind] += 1
        self.seen.append(Seen(kind, self._now.copy(), self._done.copy(), self._live.count()))


def planned(traced: Any, x: torch.Tensor) -> tuple[StageMatrices, list[tuple[int, int]], dict[str, int]]:
    """What the planner says of all stages, the cuts of ours, and the stage of each node."""
    graph = CostGraph.from_profile(
        profile(traced, x, config=ProfileConfig(warmup_runs=0, timed_runs=1, progress=False))
    )
    model = CostModel(schedule="zero_bubble", microbatches=MICROBATCHES)
    devices = tuple(DeviceSpec(name=f"d{stage}") for stage in range(len(STARTS)))
    problem = PartitionProblem(graph=graph, devices=devices, cost_model=model)
    numbers = [node.module.rpartition(".")[2] for node in problem.units.nodes]
    layer = [int(number) if number.isdigit() else len(numbers) for number in numbers]
    placed = np.searchsorted(np.array(STARTS[1:]), np.array(layer), side="right")
    cuts = [0, *(int(np.searchsorted(placed, stage)) for stage in (1, 2)), len(placed)]
    matrices = stage_matrices(UnitSequence(problem.units), np.arange(len(placed) + 1), model)
    return (
        matrices,
        list(itertools.pairwise(cuts)),
        problem.units.stages_of_nodes(placed.tolist(), len(STARTS)),
    )


def on_the_way(schedule: Schedule, rank: int, place: int) -> int:
    """Values that have room, or have it still, for a transfer alone while an action of a rank ends."""
    traffic, actions = traffic_of(schedule, rank, expected_us()), schedule.ranks[rank]
    coming = [one for one in traffic.transfers if one.receives and one.place <= place]
    gradients = [action for action in actions[:place] if action.kind == "I" and rank]
    ended = {done for action in actions[: place + 1] for done in traffic.ended[action]}
    over = {(action.kind, action.microbatch) for action in actions[: place + 1]}
    leaving = [one for one in gradients if one not in ended and ("W", one.microbatch) in over]
    return len(leaving) + sum(one.used_by in actions[place + 1 :] for one in coming)


def half_done_microbatches(rank: int, world: int) -> None:
    """To the byte, scalars left out, with up to as many half-done microbatches as there are ranks."""
    x = torch.randn(MICROBATCHES * ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    one = x[:ROWS].clone()
    traced = trace(Scored(), (one,))
    matrices, cuts, stage_of = planned(traced, one)
    config = PipelineConfig(schedule="zero_bubble", microbatches=MICROBATCHES)
    live = LiveBytes()
    recorder = Recorder(live)
    with mock.patch.object(runner, "Timeline", return_value=recorder):
        pipeline = Pipeline(split(traced, stage_of), config=config)
    with pipeline:
        pipeline.step(x)  # makes the gradients of the weights, and the buffers of what crosses borders
        with live:
            pipeline.step(x)
    at = cuts[rank]
    held, kept, freed = matrices.held_bytes[at], matrices.kept_bytes[at], matrices.freed_bytes[at]
    before, behind = VALUE * (rank > 0), VALUE * (rank + 1 < world)
    assert max(seen.now["keeping"] for seen in recorder.seen) == rank + 1
    assert kept >= before + behind
    assert (freed > 0) == (rank > 0)
    for place, seen in enumerate(recorder.seen):
        now = seen.now
        said = now["all"] * (held - freed) + now["whole"] * freed + now["keeping"] * kept
        said -= now["all"] * VALUE * (rank == 0)  # the batch is not made in the step
        said += VALUE * on_the_way(pipeline.schedule, rank, place)
        said += freed * (seen.kind == "I")  # until the action returns
        assert seen.live_bytes - said <= SCALARS * (1 + seen.done["F"]), (rank, seen, said)
        assert seen.live_bytes >= said or LETS_GO_OF_OUTPUTS, (rank, seen, said)


def stages_of_one_rank(rank: int, world: int) -> None:
    """No microbatch's values outlive its backward, gradients too."""
    x = torch.randn(MICROBATCHES * ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    traced = trace(Scored(), (x[:ROWS].clone(),))
    _, _, stage_of = planned(traced, x[:ROWS].clone())
    config = PipelineConfig(schedule="zero_bubble", microbatches=MICROBATCHES)
    live = LiveBytes()
    with Pipeline(split(traced, stage_of), config=config) as pipeline:
        pipeline.step(x)  # makes the gradients of the weights
        with live:
            pipeline.step(x)
        assert live.count() <= SCALARS * MICROBATCHES < VALUE, live.count()
