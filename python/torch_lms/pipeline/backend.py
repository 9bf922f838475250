"""What runs a pipeline's steps: torch.distributed.pipelining, or the executor of schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from torch_lms.pipeline import torch_backend
from torch_lms.pipeline.boundary import Boundary
from torch_lms.pipeline.config import PipelineConfig
from torch_lms.pipeline.executor import Executor, Recorder
from torch_lms.pipeline.transfers import Channel
from torch_lms.ranks.members import Members
from torch_lms.schedules.actions import Action, Schedule

__all__ = ["Backend", "make_backend"]


class Backend(Protocol):
    """Runs a schedule over what crosses the borders now.

    Attributes:
        schedule: what each rank does.
    """

    schedule: Schedule

    def step(self) -> list[torch.Tensor]:
        """Runs it once; returns the microbatches' losses where the last stage is."""


def make_backend(
    config: PipelineConfig,
    schedule: Schedule | None,
    members: Members,
    boundaries: Sequence[Boundary],
    duration_us: Callable[[Action], float],
    directions: Sequence[Channel],
    recorder: Recorder,
) -> Backend:
    """What runs a step, once the boundaries know what crosses.

    Args:
        config: of the pipeline.
        schedule: what each rank does; None where torch.distributed.pipelining finds it.
        members: the ranks.
        boundaries: of this rank's stages.
        duration_us: of each action, the same on all ranks.
        directions: the channels for activations and for gradients.
        recorder: notes when actions run.
    """
    how = duration_us, directions, recorder
    if config.uses_torch:
        return torch_backend.TorchBackend(boundaries, config.schedule, config.microbatches, members, *how)
    assert schedule is not None
    return Executor(boundaries[0], schedule, *how)
