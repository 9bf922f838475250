"""The loss scale of float16: one for all ranks, and one decision on each step.

Only the last stage has a loss, so only there the scale comes in, as the gradient that backward begins with. Each rank
divides its own gradients by it. A gradient that is inf or NaN on any rank is one on all: the ranks of the pipeline tell
each other, and replicas have it in the mean of their gradients. Gradients that are DTensors are PyTorch's to ask for.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from torch_lms._torch_compat import GradScaler, grad_scaler_options
from torch_lms.errors import PipelineError
from torch_lms.pipeline.liveness import Liveness
from torch_lms.ranks.members import Members

__all__ = ["PipelineGradScaler"]


class PipelineGradScaler(GradScaler):
    """A `torch.amp.GradScaler` for the ranks of a pipeline, with its defaults.

    It is used like that one, by all ranks alike: `unscale_` where gradients are looked at or clipped, `step`, `update`.
    A rank whose stages have no parameters gives an optimizer of none: ``SGD([{"params": []}], lr=0.0)``.

    Args:
        members: the ranks of the pipeline.
        device: of this rank.
        liveness: tells of ranks that fail while this one waits for them.

    Threads: as for the pipeline, one at a time.

    Raises:
        PipelineError: if this PyTorch scales losses on CUDA alone, and this is another device.
    """

    def __init__(self, members: Members, device: torch.device, liveness: Liveness) -> None:
        options = grad_scaler_options(device)
        if options is None:
            raise PipelineError(
                f"expected a loss scale for float16 on {device.type}, found that torch {torch.__version__} has one for "
                "CUDA alone; take autocast=torch.bfloat16, or PyTorch 2.3"
            )
        super().__init__(**options)
        self._members, self._own_device, self._liveness = members, device, liveness
        self.as_tensor()  # ranks without a loss need it too

    def as_tensor(self) -> torch.Tensor:
        """A copy of the scale on the device; nothing waits for its value."""
        one = torch.ones((), device=self._own_device)
        scaled: torch.Tensor = self.scale(one)
        return scaled

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides this rank's gradients by the scale; all ranks then know whether one of them found inf or NaN.

        Args:
            optimizer: of this rank's parameters.

        Raises:
            RuntimeError: if it was called since the last `update`.
            PipelineError: if a rank fails.
        """
        with self._liveness.watched():
            super().unscale_(optimizer)
            found: dict[Any, torch.Tensor] = self._found_inf_per_device(optimizer)
            flags = [torch.zeros((), device=self._own_device), *(flag.to(self._own_device) for flag in found.values())]
            everywhere = torch.stack(flags).amax()
            dist.all_reduce(everywhere, op=dist.ReduceOp.MAX, group=self._members.group)
        found.clear()
        found[self._own_device] = everywhere

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Steps the optimizer, unless any rank found inf or NaN in its gradients.

        Args:
            optimizer: of this rank's parameters.
            args: for its ``step``.
            kwargs: likewise.

        Raises:
            RuntimeError: if it was called since the last `update`.
            PipelineError: if a rank fails.
        """
        # Optimizers that skip by themselves, as fused ones do, would else see what this rank alone has found.
        if not self._found_inf_per_device(optimizer):
            self.unscale_(optimizer)
        result: float | None = super().step(optimizer, *args, **kwargs)
        return result
