"""What a rank's stages receive and send in a step, beside what they compute; see Note [Traffic] in ``schedules``.

Note [Ahead of the device]: what NCCL sends or receives is memory that PyTorch gives to others only when the device has
done it, and a program may be a whole step ahead of its device. So it gives the device an action only when that has done
the one three before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_lms.pipeline.boundary import Boundary
from torch_lms.pipeline.transfers import Channel, Started, wait_all
from torch_lms.schedules.actions import FORWARD, Action, Schedule
from torch_lms.schedules.traffic import Transfer, traffic_of

__all__ = ["BorderTraffic"]

_ACTIONS_AHEAD = 3


class BorderTraffic:
    """One rank's receives and sends, action by action.

    A receive gets room when it is asked for, which goes with the values; nothing is kept for a microbatch that is not
    there yet. On CUDA the current stream waits for transfers, not the program.

    Args:
        boundaries: this rank's stages, which know what crosses their borders.
        schedule: of all ranks.
        rank: this one.
        duration_us: of each action, the same on all ranks.
        directions: the channels for activations and for gradients.
    """

    def __init__(
        self,
        boundaries: Sequence[Boundary],
        schedule: Schedule,
        rank: int,
        duration_us: Callable[[Action], float],
        directions: Sequence[Channel],
    ) -> None:
        self._boundary_of = {boundary.stage.index: boundary for boundary in boundaries}
        self._rank_of, self._directions = schedule.rank_of, directions
        self._place_of = {action: place for place, action in enumerate(schedule.ranks[rank])}
        self._plan = traffic_of(schedule, rank, duration_us)
        self._next: deque[Transfer] = deque()
        self._device, self._done = boundaries[0].device, deque[Any]()
        self._leaving: dict[Action, Sequence[torch.Tensor]] = {}
        self._coming: dict[Action, Started] = {}
        self._sent: dict[Action, Started] = {}

    def start(self) -> None:
        """Begins a step; what one that failed has left is forgotten."""
        self._next = deque(self._plan.transfers)
        for left in (self._leaving, self._coming, self._sent):
            left.clear()
        self._done.clear()

    def before(self, action: Action) -> Sequence[torch.Tensor] | None:
        """Starts the transfers whose turn it is, lets go of what has been received, and waits for the action's input.

        Returns:
            The input; None if no other rank makes it.
        """
        self._stay_near()
        self._transfer(self._place_of[action])
        for ended in self._plan.ended[action]:
            wait_all(self._sent.pop(ended))
        return wait_all(self._coming.pop(action)) if action in self._coming else None

    def _stay_near(self) -> None:
        """See Note [Ahead of the device]."""
        if self._device.type == "cuda":  # which need not be the process's current one
            self._done.append(torch.cuda.current_stream(self._device).record_event())
            if len(self._done) > _ACTIONS_AHEAD:
                self._done.popleft().synchronize()

    def after(self, action: Action, made: Sequence[torch.Tensor]) -> None:
        """Notes what an action has made for another rank; it is sent with the transfers before the next action."""
        self._leaving[action] = made

    def finish(self) -> None:
        """Starts what is left, and waits for all that was sent."""
        self._transfer(len(self._place_of))
        for works in self._sent.values():
            wait_all(works)
        self._sent.clear()

    def _transfer(self, place: int) -> None:
        while self._next and self._next[0].place <= place:
            one = self._next.popleft()
            forward, backward = self._directions
            channel = forward if one.made_by.kind == FORWARD else backward
            if one.receives:
                source = self._rank_of[one.made_by.stage]
                self._coming[one.used_by] = channel.receive_all(self._room_for(one.used_by), source)
            else:
                target = self._rank_of[one.used_by.stage]
                self._sent[one.made_by] = channel.send_all(self._leaving.pop(one.made_by), target)

    def _room_for(self, action: Action) -> list[torch.Tensor]:
        boundary = self._boundary_of[action.stage]
        template = boundary.crossing.incoming if action.kind == FORWARD else boundary.crossing.outgoing
        metas = boundary.metas(template)
        return [torch.empty(meta.shape, dtype=meta.dtype, device=boundary.device) for meta in metas]
