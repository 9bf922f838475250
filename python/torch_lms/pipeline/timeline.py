"""When actions ran, and how much memory they took, measured."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from torch_lms.schedules.actions import Action
from torch_lms.schedules.simulation import Event

__all__ = ["MeasuredStep", "Timeline", "peak_memory_bytes", "reset_peak_memory"]


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """One step, seen by all ranks.

    Attributes:
        events: when each action of each rank ran, in the order in which they began.
        peak_memory_bytes: the most that this process had allocated on each rank's device at once, all that lay there
            before the step included; None for a device that does not count, such as the CPU.
    """

    events: tuple[Event, ...]
    peak_memory_bytes: tuple[int | None, ...]


class Timeline:
    """Begin and end of each action of a step; on CUDA by events, so that nothing waits.

    Args:
        device: where the actions run.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda, self._device = device.type == "cuda", device
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
            torch.cuda.synchronize(self._device)
        return [
            Event(rank, action, self._elapsed_us(self._begun, begin), self._elapsed_us(self._begun, end))
            for action, begin, end in self._marks
        ]

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _elapsed_us(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end) * 1e3) if self._cuda else (end - begin) / 1e3


def reset_peak_memory(device: torch.device) -> None:
    """Has `peak_memory_bytes` count from now on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(device: torch.device) -> int | None:
    """The most that this process had allocated on a device at once; None if the device does not count."""
    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else None
