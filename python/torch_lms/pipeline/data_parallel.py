"""Pipelines side by side that train one model, each on its part of the batch.

After a step's last backward each rank averages its gradients with the ranks of the other pipelines that hold the same
stage. A gradient is divided by the number of pipelines and then summed in the order of the backend's all-reduce, which
gives all ranks the same bits. With two pipelines there is only one order: the sum is the single device's if that adds
the microbatches of each half first. A weight that several stages share is averaged in the first of them.

Buffers, such as running averages of batch norms, stay each pipeline's own after the start.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_lms.errors import PipelineError
from torch_lms.pipeline.circle import Messages
from torch_lms.pipeline.members import Members
from torch_lms.stages.installation import named_tensors
from torch_lms.stages.stage import Stage

__all__ = ["Replicas"]

_BUCKET_BYTES = 32 << 20


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
        self._parameters = list(torch.nn.ModuleList(stages).parameters())
        own = [(stage.index, name, tuple(value.shape)) for stage in stages for name, value in named_tensors(stage)]
        for rank, other in zip(members.ranks, messages.gather(own), strict=False):
            if other != own:
                raise PipelineError(
                    f"expected the ranks of data_parallel to hold the same stages, found others on rank {rank} than on "
                    f"rank {dist.get_rank()}; give the ranks with the same place in each pipeline, such as "
                    'mesh["dp"] beside mesh["pp"]'
                )

    def share_values(self) -> None:
        """Gives all members the parameters and buffers of the first."""
        for value in self._tensors:
            if value.numel():
                whole = value.detach().contiguous()
                dist.broadcast(as_bytes(whole), self.members.ranks[0], group=self.members.group)
                if whole.data_ptr() != value.data_ptr():
                    value.detach().copy_(whole)

    def average_gradients(self, without: Collection[int]) -> None:
        """Gives all members the mean of their gradients.

        Args:
            without: identities of parameters that get theirs in another way.
        """
        gradients = [
            parameter.grad
            for parameter in self._parameters
            if parameter.grad is not None and id(parameter) not in without
        ]
        under_way = []
        for bucket in _buckets(gradients):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket]).div_(self.members.count)
            under_way.append((bucket, flat, dist.all_reduce(flat, group=self.members.group, async_op=True)))
        for bucket, flat, work in under_way:
            work.wait()
            for gradient, mean in zip(bucket, flat.split([g.numel() for g in bucket]), strict=False):
                gradient.copy_(mean.view(gradient.shape))


def _buckets(gradients: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Gradients of one type together, up to a size: small ones do not each cost a round."""
    made: list[list[torch.Tensor]] = []
    room: dict[torch.dtype, tuple[list[torch.Tensor], int]] = {}
    for gradient in gradients:
        size = gradient.numel() * gradient.element_size()
        bucket, used = room.get(gradient.dtype, ([], _BUCKET_BYTES))
        if used + size > _BUCKET_BYTES:
            bucket, used = [], 0
            made.append(bucket)
        bucket.append(gradient)
        room[gradient.dtype] = (bucket, used + size)
    return made


def as_bytes(tensor: torch.Tensor) -> Any:
    """A contiguous tensor's bytes, which every backend can send whatever they mean."""
    return tensor.reshape(-1).view(torch.uint8)
