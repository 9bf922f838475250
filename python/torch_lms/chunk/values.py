"""Values by name, of an optimizer or of its groups: what a step has changed of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["Values", "take_over", "with_own_tensors"]


class Values:
    """Values by name, as they are now, to find out later which of them have changed."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._before = {key: (value, _version(value)) for key, value in values.items()}

    def changed(self, values: Mapping[str, Any], *, but: Sequence[str]) -> dict[str, Any]:
        """Those that are others now, or have been written to, without some."""
        return {
            key: value
            for key, value in values.items()
            if key not in but
            and (
                key not in self._before or self._before[key][0] is not value or self._before[key][1] != _version(value)
            )
        }


def with_own_tensors(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values; of tensors, copies that may be written to."""
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in values.items()}


def take_over(values: dict[str, Any], noted: Mapping[str, Any]) -> None:
    """What has been noted is in `values` from now on."""
    for key, value in noted.items():
        if isinstance(value, torch.Tensor) and isinstance(values.get(key), torch.Tensor):
            values[key].copy_(value)  # somebody may have the tensor
        else:
            values[key] = value


def _version(value: Any) -> int:
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0
