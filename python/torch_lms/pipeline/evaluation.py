"""Forward only: a batch through the stages, with nothing kept for a backward.

Note [Ticks]: in tick t, rank r of R runs the item that rank 0 ran in tick t - r: its stages one after the other, each
on all microbatches. After each tick every rank sends on what it made and takes what the rank before made, in one
exchange, so that no send waits for a receive that comes later. A stage takes at least R ticks, so that what the last
rank gives back to the first is there in time.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from torch_lms.errors import PartitionError, PipelineError
from torch_lms.pipeline.borders import describe
from torch_lms.pipeline.boundary import Boundary, Microbatch
from torch_lms.pipeline.messages import Messages
from torch_lms.pipeline.transfers import Channel
from torch_lms.stages.stage import Stage

__all__ = ["evaluating", "forward_all", "merge_outputs"]


@contextmanager
def evaluating(stages: Sequence[Stage]) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards each submodule is in its own mode again.

    Raises:
        PipelineError: if the code of the stages is for training alone, on all ranks alike.
    """
    modes = [(module, module.training) for stage in stages for module in stage.modules()]
    for stage in stages:
        stage.eval()
    try:
        _check_modes(stages)
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _check_modes(stages: Sequence[Stage]) -> None:
    try:
        for stage in stages:
            stage.check_modes()
    except PartitionError as error:
        raise PipelineError(str(error)) from error


class _Places:
    """Which rank runs what in which tick."""

    def __init__(self, ranks: int, stages: int, microbatches: int) -> None:
        self.ranks, self.rounds, self.microbatches = ranks, stages // ranks, microbatches
        self.period = max(microbatches, ranks)
        self.ticks = ranks - 1 + (self.rounds - 1) * self.period + microbatches

    def item(self, tick: int, place: int) -> tuple[int, int] | None:
        """Stage and microbatch of a rank in a tick."""
        round_, microbatch = divmod(tick - place, self.period)
        here = tick >= place and microbatch < self.microbatches and round_ < self.rounds
        return (round_ * self.ranks + place, microbatch) if here else None


def forward_all(
    boundaries: Sequence[Boundary],
    place: int,
    ranks: int,
    microbatches: Sequence[Microbatch],
    channel: Channel,
    messages: Messages,
    name: str,
) -> list[Any]:
    """Runs all microbatches through this rank's stages; all ranks call it alike.

    Args:
        boundaries: of this rank's stages.
        place: of this rank.
        ranks: of the pipeline.
        microbatches: what they give this rank.
        channel: for values.
        messages: for what the values are made of.
        name: of this run, not used before.

    Returns:
        What the last stage returned for each microbatch, where that is, else nothing.
    """
    count = boundaries[0].stage.count
    places = _Places(ranks, count, len(microbatches))
    by_stage = {boundary.stage.index: boundary for boundary in boundaries}
    templates: dict[int, Any] = {}  # of what goes into each stage here, and out of it
    arrived: dict[tuple[int, int], list[torch.Tensor]] = {}
    results: list[Any] = []
    for tick in range(places.ticks):
        leaving: list[torch.Tensor] = []
        coming: list[torch.Tensor] = []
        item = places.item(tick, place)
        if item is not None:
            stage, microbatch = item
            result = by_stage[stage].evaluate(templates.get(stage), arrived.pop(item, []), microbatches[microbatch])
            if stage + 1 == count:
                results.append(result)
            else:
                if microbatch == 0:
                    templates[stage + 1] = describe(result)
                    messages.tell(f"{name}/{stage + 1}", templates[stage + 1])
                leaving = by_stage[stage].pack(templates[stage + 1], result, microbatches[microbatch])
        before = places.item(tick, (place - 1) % ranks)
        if before is not None and before[0] + 1 < count:
            stage, microbatch = before[0] + 1, before[1]
            if microbatch == 0:
                templates[stage] = messages.hear(f"{name}/{stage}", (place - 1) % ranks)
            if ranks == 1:
                arrived[stage, microbatch] = leaving
                continue
            coming = by_stage[stage].empty_carriers(templates[stage])
            arrived[stage, microbatch] = coming
        channel.exchange(leaving, (place + 1) % ranks, coming, (place - 1) % ranks)
    return results


def merge_outputs(parts: Sequence[Any]) -> Any:
    """The outputs of microbatches as those of the batch: tensors follow each other, and single numbers are stacked.

    Dataclasses are merged field by field. What has no tensors is that of the first microbatch.

    Raises:
        PipelineError: for another object with tensors in it.
    """
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(parts)) if first.dim() else torch.stack(list(parts))
    if isinstance(first, dict):
        return _like(first, {key: merge_outputs([part[key] for part in parts]) for key in first})
    if isinstance(first, (tuple, list)):
        items = [merge_outputs(column) for column in zip(*parts, strict=False)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        merged = copy.copy(first)
        for name in [one.name for one in dataclasses.fields(first)]:
            object.__setattr__(merged, name, merge_outputs([getattr(part, name) for part in parts]))
        return merged
    if isinstance(first, Mapping) or any(
        isinstance(one, torch.Tensor) for one in getattr(first, "__dict__", {}).values()
    ):
        raise PipelineError(
            "expected outputs of tensors, tuples, lists, dicts and dataclasses to put microbatches together, found "
            f"{type(first).__name__}; have the model return one of these, or leave return_outputs out"
        )
    return first


def _like(first: dict[Any, Any], values: dict[Any, Any]) -> dict[Any, Any]:
    """A dict of the same type, which may take more than its items to be made, as a defaultdict does."""
    made = copy.copy(first)
    for key, value in values.items():
        made[key] = value
    return made
