"""How a model is profiled."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torch_lms.profile.tracing import SOURCES

__all__ = ["ProfileConfig"]


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """How a model is profiled.

    Attributes:
        warmup_runs: runs before the timed ones; they are left out.
        timed_runs: runs that the times are medians of.
        device: where the model runs; None means where it is. It is put back afterwards.
        pieces: whether parameters and values are brought to the device node by node, for models that are larger than
            it; None means where the model, or a step of it, does not fit.
        links: whether the links between devices are measured.
        progress: whether a progress bar is shown; None means on terminals.
        sources: where the graph may come from, see `torch_lms.profile.tracing.trace`.
        autocast: the type that ``torch.autocast`` gives the forward, such as ``torch.bfloat16``; None for none of it.
            On the meta device, which knows no autocast, sizes are those without.
        accumulate: whether timed backwards add to gradients that are there, as those of all microbatches of a step do
            but the first; not where a model is profiled in pieces. None means no, or what a pipeline's microbatches
            say.
        two_parts: whether the two parts that zero bubble makes of a backward are timed as well; they need a graph, and
            are not where a model is profiled in pieces. None means no, or what a pipeline's schedule says.
        rest_share: of the time, how much the device rests between runs, as in the bubble of a pipeline: where its power
            is what limits it, it is clocked higher then. None means 0, or what a pipeline's schedule says.

    Raises:
        ValueError: for a number of runs or a share that is out of range.
    """

    warmup_runs: int = 3
    timed_runs: int = 12
    device: str | torch.device | None = None
    pieces: bool | None = None
    links: bool = True
    progress: bool | None = None
    sources: tuple[str, ...] = SOURCES
    autocast: torch.dtype | None = None
    accumulate: bool | None = None
    two_parts: bool | None = None
    rest_share: float | None = None

    def __post_init__(self) -> None:
        if self.warmup_runs < 0 or self.timed_runs < 1:
            raise ValueError(
                f"expected warmup_runs of at least 0 and timed_runs of at least 1, found {self.warmup_runs} and "
                f"{self.timed_runs}; change them"
            )
        if self.rest_share is not None and not 0 <= self.rest_share < 1:
            raise ValueError(f"expected a rest_share from 0 to below 1, found {self.rest_share}; it is a share of time")
