"""Cuts a batch into microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torch_lms.errors import PartitionError, PipelineError
from torch_lms.stages.arguments import Argument, bind_arguments

__all__ = ["cut_batch", "name_arguments", "to_device"]


def name_arguments(arguments: Sequence[Argument], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The given arguments of the graph by name, with defaults; a rank may leave out what its stages do not use.

    Raises:
        PipelineError: for too many, unknown or doubled arguments, or another value of a constant.
    """
    try:
        return bind_arguments(arguments, args, kwargs, partial=True)
    except PartitionError as error:
        raise PipelineError(str(error)) from error


def cut_batch(values: Mapping[str, Any], microbatches: int, whole: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Cuts every tensor along its first dimension; what is no tensor goes to each microbatch as it is.

    Args:
        values: by name; tensors may stand in tuples, lists, dicts and other mappings.
        microbatches: how many.
        whole: names of values that every microbatch gets uncut.

    Raises:
        PipelineError: if tensors differ in their first dimension, or the microbatches do not divide it.
    """
    sizes: dict[int, str] = {}
    for name, value in values.items():
        if name not in whole:
            _map(value, lambda tensor, name=name: sizes.setdefault(tensor.shape[0], name))  # type: ignore[misc]
    if len(sizes) > 1:
        found = " and ".join(f"{size} of {name!r}" for size, name in sizes.items())
        raise PipelineError(
            f"expected one batch size in all tensors, found {found}; name those that are no batch in whole="
        )
    size = next(iter(sizes), microbatches)
    if size % microbatches:
        raise PipelineError(
            f"expected a batch that {microbatches} microbatches divide, found {size}; "
            f"take a batch of {max(1, size // microbatches) * microbatches}, or other microbatches"
        )
    step = size // microbatches

    def cut(name: str, value: Any, index: int) -> Any:
        if name in whole:
            return value
        return _map(value, lambda tensor: _apart(tensor[index * step : (index + 1) * step]))

    return [{name: cut(name, value, index) for name, value in values.items()} for index in range(microbatches)]


def _apart(part: torch.Tensor) -> torch.Tensor:
    """The same bytes: where a stage writes to one microbatch, autograd need not think that it has to the others."""
    return part if part.requires_grad else part.data


def _map(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The same nest with its tensors changed; tensors without dimensions stay, and any mapping becomes a dict."""
    if isinstance(value, torch.Tensor):
        return change(value) if value.dim() else value
    if isinstance(value, Mapping):
        return {key: _map(item, change) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [_map(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def to_device(values: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The same values with all tensors on the device."""
    return {name: _move(value, device) for name, value in values.items()}


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: _move(item, device) for key, item in value.items()}
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(_move(item, device) for item in value)
    return value
