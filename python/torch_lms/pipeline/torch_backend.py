"""Runs stages through torch.distributed.pipelining, with whatever schedule it has.

It is imported only where it is used: older PyTorch has none.

Note [Groups that outlive their end]: functions of `torch.distributed.nn`, which torch.distributed.pipelining imports,
have the world's group of that moment as the default of an argument. After `init_process_group` they keep it beyond
`destroy_process_group`, and its threads with it. One of Gloo's threads that lets go of a tensor while the interpreter
ends then ends the process by SIGABRT ("terminate called without an active exception"). So they are imported here: in
most programs before there is a group. Nor do pipelines keep the world's group, or chunks any: `Members` names the world
by None, and `torch_lms.chunk.ranks.until_destroyed` refers to a group weakly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from torch_lms.errors import PipelineError
from torch_lms.pipeline.border_traffic import BorderTraffic
from torch_lms.pipeline.boundary import Boundary
from torch_lms.pipeline.transfers import Channel
from torch_lms.ranks.members import Members
from torch_lms.schedules.actions import Action, Schedule
from torch_lms.schedules.rules import ONE_STAGE_EACH, make_schedule

if TYPE_CHECKING:
    from torch_lms.pipeline.executor import Recorder

__all__ = ["SCHEDULES", "TorchBackend", "is_available"]

SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero_bubble": "ScheduleInterleavedZeroBubble",
}


def is_available() -> bool:
    """Whether this PyTorch has torch.distributed.pipelining."""
    return find_spec("torch.distributed.pipelining") is not None


if dist.is_available() and is_available():
    import_module("torch.distributed.nn.functional")  # see Note [Groups that outlive their end]


class TorchBackend:
    """One rank's part of a schedule of torch.distributed.pipelining.

    Args:
        boundaries: this rank's stages, which know what crosses their borders.
        name: of the schedule.
        microbatches: in a step.
        members: the ranks.
        duration_us: of each action, the same on all ranks.
        directions: the channels for activations and for gradients.
        recorder: notes when actions run.

    Raises:
        PipelineError: if the schedule does not take these numbers.
    """

    def __init__(
        self,
        boundaries: Sequence[Boundary],
        name: str,
        microbatches: int,
        members: Members,
        duration_us: Callable[[Action], float],
        directions: Sequence[Channel],
        recorder: Recorder,
    ) -> None:
        from torch.distributed import pipelining

        from torch_lms.pipeline.torch_stage import OwnStage

        stages = boundaries[0].stage.count
        if name == "1f1b" and microbatches < stages:
            name = "gpipe"  # PyTorch's 1F1B takes no fewer microbatches than stages, and there the two hold the same
        self._microbatches = microbatches
        self._has_last = any(boundary.is_last for boundary in boundaries)
        made = [OwnStage(boundary, members.group, recorder) for boundary in boundaries]
        rule = getattr(pipelining, SCHEDULES[name])
        single = name in ONE_STAGE_EACH
        try:
            # Boundary divides the loss, so that gradients need no scaling.
            self._schedule = rule(made[0] if single else made, microbatches, loss_fn=_take_loss, scale_grads=False)
        except (ValueError, AssertionError) as error:
            raise PipelineError(
                f"expected numbers that {SCHEDULES[name]} takes, found: {error}; change microbatches"
            ) from error
        self.schedule = self._as_data(name, members.count, stages, microbatches)
        self._traffic = BorderTraffic(boundaries, self.schedule, members.place, duration_us, directions)
        for stage in made:
            stage.traffic = self._traffic

    def _as_data(self, name: str, ranks: int, stages: int, microbatches: int) -> Schedule:
        if name in ONE_STAGE_EACH:
            return make_schedule(name, ranks=ranks, stages=stages, microbatches=microbatches)
        return Schedule.from_torch(name, self._schedule.pipeline_order)

    def step(self) -> list[torch.Tensor]:
        """Runs the schedule once; returns the microbatches' losses where the last stage is."""
        losses: list[torch.Tensor] = []
        self._traffic.start()
        if self._has_last:
            placeholder = torch.zeros(self._microbatches)  # a target has to be given; Boundary has the true one
            self._schedule.step(target=placeholder, losses=losses, return_outputs=False)
        else:
            self._schedule.step(return_outputs=False)
        self._traffic.finish()
        return [loss.detach() for loss in losses]


def _take_loss(output: Any, target: Any) -> Any:
    return output
