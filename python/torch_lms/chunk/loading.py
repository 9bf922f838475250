"""State dicts that no optimizer can load, refused before anything has changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch_lms.errors import ChunkError

__all__ = ["check_shapes", "check_state_dict"]


def check_state_dict(state_dict: Any) -> None:
    """Refuses what has not the form of an optimizer's state dict.

    Raises:
        ChunkError: if so.
    """
    given = state_dict if isinstance(state_dict, Mapping) else {}
    states, groups = given.get("state"), given.get("param_groups")
    if not isinstance(states, Mapping) or not _are_groups(groups):
        found = type(state_dict).__name__
        if isinstance(state_dict, Mapping):
            found += " with " + (", ".join(map(repr, list(given)[:4])) or "nothing")
        raise ChunkError(
            "expected an optimizer's state dict, with 'state', a dict, and 'param_groups', a list of dicts that have "
            f"'params', found {found}; pass what optimizer.state_dict() has returned"
        )
    for number, state in states.items():
        if not isinstance(state, Mapping):
            raise ChunkError(
                f"expected the state of parameter {number} to be a dict, found {type(state).__name__}; pass what "
                "optimizer.state_dict() has returned"
            )


def check_shapes(name: str, shape: Sequence[int], keys: Sequence[str], state: Mapping[str, Any]) -> None:
    """Refuses a tensor's state that is another tensor's.

    Args:
        name: of the tensor.
        shape: likewise.
        keys: of what the optimizer keeps in that shape.
        state: that is to be loaded; may lack keys.

    Raises:
        ChunkError: if so.
    """
    for key in keys:
        value = state.get(key)
        found = tuple(value.shape) if isinstance(value, torch.Tensor) else repr(value)
        if key in state and found != tuple(shape):
            raise ChunkError(
                f"expected {key!r} of {name} to be a tensor of shape {tuple(shape)}, found {found}; load the state "
                "dict of an optimizer of this model, with its parameters in the same order"
            )


def _are_groups(groups: Any) -> bool:
    return isinstance(groups, list | tuple) and all(
        isinstance(one, Mapping) and isinstance(one.get("params"), list | tuple) for one in groups
    )
