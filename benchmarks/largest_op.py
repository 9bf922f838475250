"""How many bytes the inputs and outputs of a program's largest op hold together: what has to be there at once."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["LargestOp"]


class LargestOp(TorchDispatchMode):
    """Within it, ops are measured; each storage counts once.

    Attributes:
        name: of the largest so far.
        nbytes: of its inputs and outputs.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = ""
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an op and measures what went in and came out."""
        results = func(*args, **(kwargs or {}))
        storages = {
            leaf.untyped_storage()._cdata: leaf.untyped_storage().nbytes()
            for leaf in pytree.tree_leaves((args, kwargs, results))
            if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided
        }
        if sum(storages.values()) > self.nbytes:
            self.name, self.nbytes = str(func), sum(storages.values())
        return results
