"""Counts the bytes of what ops have made and is still there."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torch_lms._torch_compat import storage_bytes, storage_key, storage_weak_ref, tree_flatten

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):
    """Of all storages that ops have made under it."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[Any, int]] = {}
        self.peak_bytes = 0  # where an op has ended

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage_key(one) for one in tree_flatten((args, kwargs))[0] if isinstance(one, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for one in tree_flatten(result)[0]:
            if isinstance(one, torch.Tensor) and storage_key(one) not in given:
                self._storages[storage_key(one)] = storage_weak_ref(one), storage_bytes(one)
        self.peak_bytes = max(self.peak_bytes, self.count())
        return result

    def count(self) -> int:
        """Of those that are still there."""
        self._storages = {key: found for key, found in self._storages.items() if not found[0].expired()}
        return sum(nbytes for _, nbytes in self._storages.values())
