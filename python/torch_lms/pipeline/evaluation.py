"""Forward only: a batch through the stages, with nothing kept for a backward.

Note [Ticks]: in tick t, rank r of R runs the item that rank 0 ran in tick t - r: its stages one after the other, each
on all microbatches. After each tick every rank sends on what it made and takes what the rank before made, in one
exchange, so that no send waits for a receive that comes later. A stage takes at least R ticks, so that what the last
rank gives back to the first is there in time.

Note [Modes]: a trace may write down that it was made for training: ``dropout(x, 0.1, True)``. So while stages
evaluate, functions that know the difference are told that this is no training. A ``dropout`` that the model wants
outside of training too does nothing here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torch_lms._torch_compat import function_mode
from torch_lms.pipeline.borders import describe
from torch_lms.pipeline.boundary import Boundary, Microbatch
from torch_lms.pipeline.messages import Messages
from torch_lms.pipeline.transfers import Channel

__all__ = ["evaluating", "forward_all", "merge_outputs"]


@contextmanager
def evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards each submodule is in its own mode again."""
    modes = [(module, module.training) for root in modules for module in root.modules()]
    for root in modules:
        root.eval()
    try:
        with torch.no_grad(), function_mode(_call_outside_training):
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _call_outside_training(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = getattr(function, "__name__", "").split(".")[0].rstrip("_")
    names = _TRAINING.get(name)
    return function(*args, **kwargs) if names is None else _with(function, args, kwargs, *names)


def _with(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str], value: Any
) -> Any:
    """Calls a function with another value of one argument, which has one of the names."""
    for place, name in enumerate(_argument_names(function)):
        if name in names and place < len(args):
            return function(*args[:place], value, *args[place + 1 :], **kwargs)
        if name in names:
            return function(*args, **{**kwargs, name: value})
    return function(*args, **kwargs)


def _argument_names(function: Callable[..., Any]) -> Sequence[str]:
    schema = getattr(function, "_schema", None)
    if schema is not None:
        return [argument.name for argument in schema.arguments]
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return _BUILTIN.get(getattr(function, "__name__", ""), ())


# What tells a function that this is training, and what it is told here.
_TRAINING: dict[str, tuple[tuple[str, ...], Any]] = {
    **dict.fromkeys(
        (
            *("dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "alpha_dropout"),
            *("feature_alpha_dropout", "batch_norm", "rrelu"),
        ),
        (("training", "train"), False),
    ),
    "instance_norm": (("use_input_stats",), False),
    "scaled_dot_product_attention": (("dropout_p",), 0.0),
}
# Arguments of builtin functions, which have no signature.
_BUILTIN = {
    **{
        name: ("input", "p", "train")
        for kind in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
        for name in (kind, f"{kind}_")
    },
    "batch_norm": ("input", "weight", "bias", "running_mean", "running_var", "training"),
    "rrelu": ("input", "lower", "upper", "training"),
    "scaled_dot_product_attention": ("query", "key", "value", "attn_mask", "dropout_p"),
}


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

    What is neither a tensor nor a nest of them is that of the first microbatch.
    """
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(parts)) if first.dim() else torch.stack(list(parts))
    if isinstance(first, dict):
        return type(first)({key: merge_outputs([part[key] for part in parts]) for key in first})
    if isinstance(first, (tuple, list)):
        items = [merge_outputs(column) for column in zip(*parts, strict=False)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    return first
