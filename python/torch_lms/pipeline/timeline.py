"""When actions ran, measured."""

from __future__ import annotations

import time
from typing import Any

import torch

from torch_lms.schedules.actions import Action
from torch_lms.schedules.simulation import Event

__all__ = ["Timeline"]


class Timeline:
    """Begin and end of each action of a step; on CUDA by events, so that nothing waits.

    Args:
        device: where the actions run.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.enabled = False
        self._begun: Any = None
        self._marks: list[tuple[Action, Any, Any]] = []
        self._open: Any = None

    def start(self) -> None:
        """Begins a step: time 0."""
        self._marks.clear()
        if self.enabled:
            self._begun = self._now()

    def begin(self, action: Action) -> None:
        """Before the action."""
        if self.enabled:
            self._open = self._now()

    def end(self, action: Action) -> None:
        """After it."""
        if self.enabled:
            self._marks.append((action, self._open, self._now()))

    def events(self, rank: int) -> list[Event]:
        """What was measured; waits for the device."""
        if self._cuda and self._marks:
            torch.cuda.synchronize()
        return [
            Event(rank, action, self._elapsed_us(self._begun, begin), self._elapsed_us(self._begun, end))
            for action, begin, end in self._marks
        ]

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _elapsed_us(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end) * 1e3) if self._cuda else (end - begin) / 1e3
