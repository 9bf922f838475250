"""When the updates of a step run, and how much of that hides behind its backward.

Events of CUDA and the host's clock are put on one axis: the device is idle when both begin.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from torch_lms.swap.link import wait_for_device

__all__ = ["Span", "Timeline"]

_Mark: TypeAlias = "torch.cuda.Event | float"  # on a stream, or seconds of the host's clock


@dataclass(frozen=True, kw_only=True)
class Span:
    """Something that ran.

    Attributes:
        lane: what it was: copies one way, updates, or the backward.
        begin_us: since the recording began.
        end_us: likewise.
        beside: whether backward could go on meanwhile.
    """

    lane: str
    begin_us: float
    end_us: float
    beside: bool = True


class Timeline:
    """Records one step.

    Backward is what comes before the last gradient. What hides behind it may slow it down all the same: both share the
    memory, and on the host the cores.

    Thread-safe, but for `begin` and `end`.

    Args:
        device: of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._marks: list[tuple[str, _Mark, _Mark, bool]] = []
        self._last_gradient: _Mark | None = None
        self.spans: tuple[Span, ...] = ()

    def begin(self) -> None:
        """Waits for the device."""
        wait_for_device(self._device)
        self._base = self._mark(torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None)
        self._base_s = time.perf_counter()

    @contextmanager
    def span(self, lane: str, stream: torch.cuda.Stream | None, *, beside: bool = True) -> Iterator[None]:
        """What is done inside of it, on a stream or else on the calling thread."""
        begin = self._mark(stream)
        yield
        with self._lock:
            self._marks.append((lane, begin, self._mark(stream), beside))

    def gradient_came(self, _: torch.Tensor) -> None:
        """In backward, on its stream: it goes on at least until here."""
        self._last_gradient = self._mark(
            torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        )

    def end(self) -> None:
        """All updates have ended on the host: `spans` are there when this returns. Waits for the device."""
        wait_for_device(self._device)
        found = [
            Span(lane=lane, begin_us=self._at_us(begin), end_us=self._at_us(end), beside=beside)
            for lane, begin, end, beside in self._marks
        ]
        if self._last_gradient is not None:
            found.append(Span(lane="backward", begin_us=0.0, end_us=self._at_us(self._last_gradient)))
        self.spans = tuple(sorted(found, key=lambda span: span.begin_us))

    @property
    def update_us(self) -> float:
        """In which some update, or a copy for one, ran."""
        return sum(end - begin for begin, end in _joined(self._updates()))

    @property
    def hidden_share(self) -> float | None:
        """How much of that lies before the last gradient, and beside what makes gradients; None without updates."""
        total_us = self.update_us
        if not total_us:
            return None
        until_us = max((span.end_us for span in self.spans if span.lane == "backward"), default=0.0)
        beside = _joined(span for span in self._updates() if span.beside)
        return sum(max(0.0, min(end, until_us) - begin) for begin, end in beside) / total_us

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """For chrome://tracing or ui.perfetto.dev: a row for each lane."""
        lanes = list(dict.fromkeys(span.lane for span in self.spans))
        names = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": row, "args": {"name": lane}}
            for row, lane in enumerate(lanes)
        ]
        spans = [
            {
                "name": span.lane,
                "ph": "X",
                "pid": 0,
                "tid": lanes.index(span.lane),
                "ts": span.begin_us,
                "dur": span.end_us - span.begin_us,
            }
            for span in self.spans
        ]
        Path(path).write_text(json.dumps({"traceEvents": names + spans}))

    def _updates(self) -> Iterator[Span]:
        return (span for span in self.spans if span.lane != "backward")

    def _mark(self, stream: torch.cuda.Stream | None) -> _Mark:
        if stream is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def _at_us(self, mark: _Mark) -> float:
        if isinstance(mark, float):
            return 1e6 * (mark - self._base_s)
        assert isinstance(self._base, torch.cuda.Event)
        return 1e3 * float(self._base.elapsed_time(mark))


def _joined(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Where there is any of them, once."""
    found: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda span: span.begin_us):
        if found and span.begin_us <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], span.end_us))
        else:
            found.append((span.begin_us, span.end_us))
    return found
