"""Pipelines side by side that train one model, each on its part of the batch.

In a step each rank averages its gradients with the ranks of the other pipelines that hold the same stage, as
`torch_lms.pipeline.averaging` says. With two pipelines the sum is the single device's if that adds the microbatches of
each half first. A weight that several stages share is averaged in the first of them.

Buffers, such as running averages of batch norms, stay each pipeline's own after the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_lms.errors import PipelineError
from torch_lms.pipeline.messages import Messages
from torch_lms.ranks.members import Members
from torch_lms.stages.installation import named_tensors
from torch_lms.stages.stage import Stage

__all__ = ["Replicas"]


class Replicas:
    """The ranks that hold the same stages in other pipelines.

    Args:
        members: these ranks and this one.
        stages: of this rank, on their devices.
        messages: among the members.

    Raises:
        PipelineError: if another member holds other stages.
    """

    def __init__(self, members: Members, stages: Sequence[Stage], messages: Messages) -> None:
        self.members = members
        self._tensors = [value for stage in stages for _, value in named_tensors(stage)]
        own = [
            (stage.index, name, tuple(value.shape), value.dtype, value.requires_grad)
            for stage in stages
            for name, value in named_tensors(stage)
        ]
        for rank, other in zip(members.ranks, messages.gather(own), strict=False):
            if other != own:
                raise PipelineError(
                    f"expected the ranks of data_parallel to hold the same stages, found others on rank {rank} than on "
                    f"rank {dist.get_rank()}; give the ranks with the same place in each pipeline, such as "
                    'mesh["dp"] beside mesh["pp"], and train the same parameters on all'
                )

    def share_values(self) -> None:
        """Gives all members the parameters and buffers of the first."""
        for value in self._tensors:
            if value.numel():
                # A copy: what a collective was given is never paged out again.
                whole = value.detach().clone(memory_format=torch.contiguous_format)
                dist.broadcast(as_bytes(whole), self.members.ranks[0], group=self.members.group)
                value.detach().copy_(whole)


def as_bytes(tensor: torch.Tensor) -> Any:
    """A contiguous tensor's bytes, which every backend can send whatever they mean."""
    return tensor.reshape(-1).view(torch.uint8)
