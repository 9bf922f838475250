"""Runs GPipe and 1F1B over torch.distributed alone, for versions of PyTorch without torch.distributed.pipelining.

What crosses borders goes as in ``border_traffic``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from torch_lms.pipeline.border_traffic import BorderTraffic
from torch_lms.pipeline.boundary import Boundary
from torch_lms.pipeline.transfers import Channel
from torch_lms.schedules.actions import FORWARD, Action, Schedule

__all__ = ["Executor", "Recorder", "Recorders"]


_Held = dict[int, tuple[list[torch.Tensor], Sequence[torch.Tensor]]]  # of each microbatch in flight, in and out


class Recorder(Protocol):
    """Notes when actions run."""

    def begin(self, action: Action) -> None:
        """Before the action."""

    def end(self, action: Action) -> None:
        """After it."""


class Recorders:
    """Several recorders as one, each around those before it."""

    def __init__(self, *recorders: Recorder) -> None:
        self._recorders = recorders

    def begin(self, action: Action) -> None:
        """Before the action."""
        for one in reversed(self._recorders):
            one.begin(action)

    def end(self, action: Action) -> None:
        """After it."""
        for one in self._recorders:
            one.end(action)


class Executor:
    """One rank's part of a schedule.

    Args:
        boundary: this rank's stage.
        schedule: of all ranks; stage s is on rank s.
        duration_us: of each action, the same on all ranks.
        directions: the channels for activations and for gradients.
        recorder: notes when actions run.
    """

    def __init__(
        self,
        boundary: Boundary,
        schedule: Schedule,
        duration_us: Callable[[Action], float],
        directions: Sequence[Channel],
        recorder: Recorder,
    ) -> None:
        self._boundary, self.schedule, self._recorder = boundary, schedule, recorder
        self._traffic = BorderTraffic([boundary], schedule, boundary.stage.index, duration_us, directions)

    def step(self) -> list[torch.Tensor]:
        """Runs the schedule once on the microbatches that the boundary was given.

        Returns:
            The losses of the microbatches on the last stage, else nothing.
        """
        held: _Held = {}
        losses: list[torch.Tensor] = []
        self._traffic.start()
        for action in self.schedule.ranks[self._boundary.stage.index]:
            self._traffic.after(action, self._run(action, self._traffic.before(action), held, losses))
        self._traffic.finish()
        return losses

    def _run(
        self, action: Action, received: Sequence[torch.Tensor] | None, held: _Held, losses: list[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Runs an action, of which nothing but what it gives outlives the call.

        Returns:
            What it has made for another rank.
        """
        self._recorder.begin(action)
        if action.kind == FORWARD:
            inputs = [tensor.requires_grad_() for tensor in received or ()]
            outputs = self._boundary(*inputs)
            if self._boundary.is_last:
                outputs = (outputs,)
                losses.append(outputs[0].detach())
            held[action.microbatch] = (inputs, outputs)
            leaving = [] if self._boundary.is_last else [output.detach() for output in outputs]
        else:
            inputs, outputs = held.pop(action.microbatch)
            torch.autograd.backward(outputs, received)
            leaving = [tensor.grad for tensor in inputs if tensor.grad is not None]
        self._recorder.end(action)
        return leaving
