"""Memory over time: sampled by a thread, drawn as a picture.

Tensor bytes are what tensors hold on the device. Anonymous bytes are the process's memory that no file
stands behind: what a CPU-only machine runs out of, and what paging to a spill file must spare.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import torch

import torch_lms
from torch_lms.memory_sizes import GIB

__all__ = ["MemorySampler", "Sample", "Timeline", "anonymous_bytes", "draw_timelines"]


_COLORS = {"plain": "#7a7a7a", "limited": "#1f6fb4", "limit": "#c0392b"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Memory at one moment, in seconds since sampling began."""

    seconds: float
    tensor_bytes: int
    anonymous_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Samples in the order of time."""

    samples: list[Sample] = field(default_factory=list)

    def thinned(self, most: int = 600) -> Timeline:
        """At most ``most`` samples: of each stretch of time, the one with the most anonymous and tensor bytes."""
        every = -(-len(self.samples) // most)
        if every <= 1:
            return self
        stretches = (self.samples[at : at + every] for at in range(0, len(self.samples), every))
        return Timeline(samples=[max(part, key=lambda s: s.anonymous_bytes + s.tensor_bytes) for part in stretches])


def anonymous_bytes() -> int:
    """The process's resident anonymous memory, from the kernel.

    Raises:
        OSError: where there is no ``/proc``, or it does not say.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("expected RssAnon in /proc/self/status, found none; run on Linux 4.5 or later")


class MemorySampler:
    """Samples memory on a thread of its own while its context is open.

    Args:
        device: whose tensor bytes. Those of the CPU are counted only after `torch_lms.enable` or
            `torch_lms.swap.count_cpu_allocations`.
        period_s: between samples.
    """

    def __init__(self, device: torch.device, period_s: float = 0.005) -> None:
        self._device = device
        self._period_s = period_s
        self._samples: list[Sample] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory sampler", daemon=True)

    @property
    def timeline(self) -> Timeline:
        """What has been sampled so far."""
        return Timeline(samples=list(self._samples))

    def __enter__(self) -> MemorySampler:
        self._began = time.perf_counter()
        self._samples.append(self._sample())
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            self._samples.append(self._sample())

    def _sample(self) -> Sample:
        return Sample(
            seconds=time.perf_counter() - self._began,
            tensor_bytes=self._tensor_bytes(),
            anonymous_bytes=anonymous_bytes(),
        )

    def _tensor_bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        return torch_lms.stats().allocated_bytes


def draw_timelines(timelines: Mapping[str, Timeline], *, limit_bytes: int, title: str, path: Path) -> None:
    """Draws the runs side by side: tensor bytes with the limit, and anonymous memory below.

    Args:
        timelines: by the name of the run, ``plain`` and ``limited``.
        limit_bytes: drawn as a line among the tensor bytes.
        title: of the picture.
        path: of the picture; its ending (png, svg, pdf) says what is written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 6.0), layout="constrained")
    tensors, anonymous = figure.subplots(2, 1, sharex=True)
    for name, timeline in timelines.items():
        seconds = [sample.seconds for sample in timeline.samples]
        color = _COLORS.get(name)
        for axes, values in (
            (tensors, [sample.tensor_bytes / GIB for sample in timeline.samples]),
            (anonymous, [sample.anonymous_bytes / GIB for sample in timeline.samples]),
        ):
            axes.plot(seconds, values, label=f"{name}, peak {max(values, default=0.0):.2f} GiB", color=color)
    tensors.axhline(
        limit_bytes / GIB, color=_COLORS["limit"], linestyle="--", label=f"limit, {limit_bytes / GIB:.2f} GiB"
    )
    tensors.set_title(title)
    tensors.set_ylabel("Tensors on the device (GiB)")
    anonymous.set_ylabel("Anonymous memory (GiB)")
    anonymous.set_xlabel("Time (s)")
    for axes in (tensors, anonymous):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(loc="upper right", framealpha=0.9)
    figure.savefig(path, dpi=120)
