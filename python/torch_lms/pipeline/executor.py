"""Runs GPipe and 1F1B over torch.distributed alone, for versions of PyTorch without torch.distributed.pipelining.

Activations go forward in one channel and gradients backward in another, each in the order of the microbatches on
both of its ends, so that no send waits for a receive that comes later. What the next action needs is asked for before
the present one runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from torch_lms.pipeline.boundary import Boundary
from torch_lms.pipeline.transfers import Channel, wait_all
from torch_lms.schedules.actions import BACKWARD, FORWARD, Action, Schedule

__all__ = ["Executor", "Recorder", "Recorders"]


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
        directions: the channels for activations and for gradients.
        recorder: notes when actions run.
    """

    def __init__(
        self,
        boundary: Boundary,
        schedule: Schedule,
        directions: tuple[Channel, Channel],
        recorder: Recorder,
    ) -> None:
        self._boundary, self.schedule, self._recorder = boundary, schedule, recorder
        self._channels = dict(zip((FORWARD, BACKWARD), directions, strict=False))
        self._stage = boundary.stage.index

    def step(self) -> list[torch.Tensor]:
        """Runs the schedule once on the microbatches that the boundary was given.

        Returns:
            The losses of the microbatches on the last stage, else nothing.
        """
        actions = self.schedule.ranks[self._stage]
        asked: dict[Action, list[tuple[torch.Tensor, Any]]] = {}
        held: dict[int, tuple[list[torch.Tensor], Sequence[torch.Tensor]]] = {}
        sent: list[tuple[torch.Tensor, Any]] = []
        losses: list[torch.Tensor] = []
        for place, action in enumerate(actions):
            for coming in actions[place : place + 2]:
                if coming not in asked:
                    asked[coming] = self._ask(coming)
            received = wait_all(asked.pop(action))
            self._recorder.begin(action)
            if action.kind == FORWARD:
                inputs = [tensor.requires_grad_() for tensor in received]
                outputs = self._boundary(*inputs)
                if self._boundary.is_last:
                    outputs = (outputs,)
                    losses.append(outputs[0].detach())
                held[action.microbatch] = (inputs, outputs)
                leaving = [] if self._boundary.is_last else [output.detach() for output in outputs]
            else:
                inputs, outputs = held.pop(action.microbatch)
                torch.autograd.backward(outputs, received if received else None)
                leaving = [tensor.grad for tensor in inputs if tensor.grad is not None]
            self._recorder.end(action)
            sent += self._send(action, leaving)
        wait_all(sent)
        return losses

    def _ask(self, action: Action) -> list[tuple[torch.Tensor, Any]]:
        """Starts to receive what an action needs from another stage."""
        forward = action.kind == FORWARD
        crossing = self._boundary.crossing
        template = crossing.incoming if forward else crossing.outgoing
        source = self._stage + (-1 if forward else 1)
        made = []
        for meta in self._boundary.metas(template):
            buffer = torch.empty(meta.shape, dtype=meta.dtype, device=self._boundary.device)
            made.append(self._channels[action.kind].receive(buffer, source))
        return made

    def _send(self, action: Action, tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, Any]]:
        target = self._stage + (1 if action.kind == FORWARD else -1)
        return [self._channels[action.kind].send(tensor, target) for tensor in tensors]
