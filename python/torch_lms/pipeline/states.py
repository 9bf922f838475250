"""State dicts of a pipeline: gathered from its ranks, and loaded into them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_lms.errors import PipelineError
from torch_lms.pipeline.data_parallel import as_bytes
from torch_lms.pipeline.messages import Messages
from torch_lms.ranks.members import Members
from torch_lms.stages.stage import Stage
from torch_lms.stages.state_dicts import find_entry, in_order, merge_state_dicts

__all__ = ["check_receiver", "gather_state", "load_state", "names_of"]


def names_of(stages: Sequence[Stage]) -> tuple[str, ...]:
    """All names of the model's state dict, those of tied weights as well, in its order."""
    own = {name: None for stage in stages for name in stage.state_dict()}
    tied = {name: None for stage in stages for others in stage.shared.values() for _, name in others}
    return tuple(in_order({**own, **tied}, stages[0].order))


def check_receiver(full: bool, to: int | None, ranks: int) -> None:
    """Looks whether the rank that a state dict is for makes sense, before any rank waits for another.

    Args:
        full: whether the whole is asked for.
        to: place of the rank that gets it; None for all.
        ranks: of the pipeline.

    Raises:
        PipelineError: if it does not, on all ranks alike.
    """
    if to is not None and not full:
        raise PipelineError(
            f"expected to= with full=True alone, found to={to!r} without it: each rank has its own part; ask for "
            "full=True, or leave to= out"
        )
    if to is not None and to not in range(ranks):
        raise PipelineError(
            f"expected to= among the places of the pipeline's ranks, 0 to {ranks - 1}, found {to!r}; name the place in "
            "the group, not the rank in the world, or None for all"
        )


def gather_state(
    own: Mapping[str, Any],
    members: Members,
    messages: Messages,
    device: torch.device,
    to: int | None,
    order: Sequence[str],
) -> dict[str, Any]:
    """The model's state dict on the CPU, tensor after tensor.

    Args:
        own: this rank's part.
        members: the ranks of the pipeline.
        messages: among them.
        device: of this rank.
        to: place of the rank that keeps it; None for all.
        order: of the model's names.

    Returns:
        The whole, or nothing on ranks that do not keep it.
    """
    meta = {name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in own.items()}
    parts: list[dict[str, Any]] = []
    for place, told in enumerate(messages.gather(meta)):
        part: dict[str, Any] = {}
        for name, value in told.items():
            if isinstance(value, torch.Tensor):
                here = own[name].detach() if place == members.place else torch.empty_like(value, device=device)
                value = _broadcast(here.contiguous(), members, place)
            part[name] = value.cpu() if isinstance(value, torch.Tensor) and to in (None, members.place) else value
        parts.append(part)
        if to not in (None, members.place):
            parts.clear()
    return in_order(merge_state_dicts(parts), order)


def _broadcast(value: torch.Tensor, members: Members, place: int) -> torch.Tensor:
    if value.numel():
        value = value.clone() if place == members.place else value
        dist.broadcast(as_bytes(value), members.ranks[place], group=members.group)
    return value


def load_state(stages: Sequence[Stage], state_dict: Mapping[str, Any], known: Sequence[str], strict: bool) -> None:
    """Copies values into this rank's stages.

    Args:
        stages: of this rank.
        state_dict: of the whole model, or of this rank.
        known: all names of the model.
        strict: whether names that are missing, or that the model has not, are errors.

    Raises:
        PipelineError: for such names, or for another shape.
    """
    parts = [{name: find_entry(state_dict, stage, name) for name in stage.state_dict()} for stage in stages]
    missing = sorted({name for part in parts for name, value in part.items() if value is None})
    unexpected = sorted(set(state_dict).difference(known))
    if strict and (missing or unexpected):
        raise PipelineError(
            f"expected a state dict of the model or of this rank's stages, found that {_listed(missing)} missing and "
            f"{_listed(unexpected)} unexpected; give the one that state_dict() made, or strict=False"
        )
    for stage, part in zip(stages, parts, strict=False):
        try:
            stage.load_state_dict({name: value for name, value in part.items() if value is not None}, strict=False)
        except RuntimeError as error:  # another shape; PyTorch names the entry
            raise PipelineError(f"expected the values of this model, found others: {error}; load its own") from error


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"{shown} {'is' if len(names) == 1 else 'are'}" if names else "nothing is"
