"""When each node's computation starts and ends, forward and backward, without waiting for the device in between.

One run is a line of marks. A mark in the forward stands behind each node; a mark in the backward stands where the
gradient of a node's output is complete and its own backward begins. The time from one mark to the next is that node's:

    forward    | embed | linear | relu | ...        each mark ends the node before it
    backward   | ... | relu | linear | embed |      each mark starts the node behind it

Autograd runs the functions of a backward in the reverse order in which the forward made them, so that all between two
marks belongs to one node, the accumulation of its parameters' gradients included.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from torch_lms.profile.storages import tensors_in

__all__ = ["Clock", "NodeTimes", "RunTimer", "Span", "make_clock"]

# A device is kept busy for a while after so many marks, so that Python is ahead of it and gaps between launches are not
# taken for the time of nodes.
_MARKS_PER_LEAD = 128
_LEAD_CYCLES = 8_000_000  # about 4 ms

_Runs = dict[str, list[float]]  # by node what it took, on the device or the host, in each run


class Clock(Protocol):
    """Marks points in time on a device."""

    def mark(self) -> Any:
        """A point in time, behind all work given to the device so far."""

    def lead(self) -> None:
        """Lets Python get ahead of the device."""

    def elapsed_us(self, start: Any, end: Any) -> float:
        """Time between two marks; only after `wait`."""

    def wait(self) -> None:
        """Waits until the device has passed all marks; they may be used again."""


class _HostClock:
    """For devices on which a call returns when its work is done."""

    def mark(self) -> int:
        return time.perf_counter_ns()

    def lead(self) -> None:
        pass

    def elapsed_us(self, start: int, end: int) -> float:
        return (end - start) / 1e3

    def wait(self) -> None:
        pass


class _CudaClock:
    """Events on the current stream, made once and used in each run."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[Any] = []
        self._used = 0

    def mark(self) -> Any:
        if self._used == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))
        event = self._events[self._used]
        self._used += 1
        event.record(torch.cuda.current_stream(self._device))
        return event

    def lead(self) -> None:
        sleep: Callable[[int], None] = torch.cuda._sleep
        sleep(_LEAD_CYCLES)

    def elapsed_us(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) * 1e3

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)
        self._used = 0


def make_clock(device: torch.device) -> Clock:
    """The clock of a device."""
    return _CudaClock(device) if device.type == "cuda" else _HostClock()


class Span(NamedTuple):
    """What lies between two marks: a node's forward or its backward."""

    node: str
    backward: bool
    start: Any
    end: Any
    host_us: float


@dataclass(frozen=True)
class NodeTimes:
    """Of nodes in one direction, by name: medians over runs, as Python falls behind the device for tens of ms at times.

    Attributes:
        device_us: from mark to mark.
        host_us: what Python took for it.
    """

    device_us: Mapping[str, float]
    host_us: Mapping[str, float]


class RunTimer:
    """Times the nodes of one run after the other.

    Args:
        clock: of the device that runs.
        leads: whether Python is let ahead of the device.

    Attributes:
        spans: of the runs that are not finished.
    """

    def __init__(self, clock: Clock, *, leads: bool = True) -> None:
        self.spans: list[Span] = []
        self._clock, self._leads = clock, leads
        self._kept: tuple[_Runs, ...] = tuple(defaultdict(list) for _ in range(4))  # forwards, then backwards
        self._ends: list[int] = []  # of the runs in `spans` but the last
        self._marks = 0
        self._functions: set[Any] = set()
        self._running: str | None = None
        self._start: Any = None
        self._began_ns = 0

    def watch(self, name: str, run: Callable[[], Any]) -> Any:
        """Runs a node's forward and prepares its backward for being timed."""
        start, began_ns = self._mark(), time.perf_counter_ns()
        value = run()
        host_us = (time.perf_counter_ns() - began_ns) / 1e3
        self.spans.append(Span(name, False, start, self._clock.mark(), host_us))
        for tensor in tensors_in(value):
            function = tensor.grad_fn if tensor.requires_grad else None
            if function is not None:
                self._hook(name, tensor, function)
        return value

    def _hook(self, name: str, tensor: torch.Tensor, function: Any) -> None:
        """Marks where the node's backward begins, unless another node has made the tensor."""
        if (function, name) not in self._functions and function in self._functions:
            return
        self._functions |= {function, (function, name)}
        timer = weakref.proxy(self)  # it holds the functions, which hold their hooks: nobody would see that cycle
        tensor.register_hook(lambda _gradient: timer._enter(name))

    def backward(self, run: Callable[[], None]) -> None:
        """Runs the backward of what has run forward."""
        self._running, self._start = None, None
        run()
        self._leave(self._clock.mark())

    def _enter(self, name: str) -> None:
        """A node's backward begins; that of the node before it has ended."""
        if name != self._running:
            self._leave(self._clock.mark())
            self._running, self._start = name, self._mark()
            self._began_ns = time.perf_counter_ns()

    def _leave(self, end: Any) -> None:
        if self._running is not None:
            host_us = (time.perf_counter_ns() - self._began_ns) / 1e3
            self.spans.append(Span(self._running, True, self._start, end, host_us))

    def _mark(self) -> Any:
        if self._leads and self._marks % _MARKS_PER_LEAD == 0:
            self._clock.lead()
        self._marks += 1
        return self._clock.mark()

    def next_run(self) -> None:
        """What comes is another run; the device is not waited for."""
        self._ends.append(len(self.spans))
        self._functions.clear()

    def finish_runs(self, keep: bool) -> None:
        """Keeps the times of the runs since the last such call, or leaves them out: then they were for warming up."""
        self._clock.wait()
        if keep:
            ends = [*self._ends, len(self.spans)]
            for start, end in zip([0, *ends], ends, strict=False):
                self._keep(self.spans[start:end])
        self.spans.clear()
        self._ends.clear()
        self._functions.clear()
        self._marks = 0

    def repeat(self, known: str, name: str) -> None:
        """Has a node the times of another one, which does the same."""
        for runs in self._kept:
            if known in runs:
                runs[name] = runs[known]

    def _keep(self, spans: Sequence[Span]) -> None:
        """A run; a node may have several spans in one direction."""
        sums: list[dict[str, float]] = [defaultdict(float) for _ in self._kept]
        for span in spans:
            device_us, host_us = sums[2 * span.backward : 2 * span.backward + 2]
            device_us[span.node] += self._clock.elapsed_us(span.start, span.end)
            host_us[span.node] += span.host_us
        for runs, run in zip(self._kept, sums, strict=True):
            for node, time_us in run.items():
                runs[node].append(time_us)

    def times(self) -> tuple[NodeTimes, NodeTimes]:
        """Forward and backward, over the runs that were kept and have the node."""
        medians = [{node: statistics.median(times_us) for node, times_us in runs.items()} for runs in self._kept]
        return NodeTimes(*medians[:2]), NodeTimes(*medians[2:])
