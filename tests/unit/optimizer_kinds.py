"""PyTorch's optimizers that have an implementation for many tensors, and how many tensors it is given at once."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgd with momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "maximize": True}),
    "sgd with nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {}),
    "adam with amsgrad": (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {}),
    "adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1}),
    "adadelta": (torch.optim.Adadelta, {"weight_decay": 0.1}),
    "adamax": (torch.optim.Adamax, {}),
    "asgd": (torch.optim.ASGD, {"t0": 1.0}),
    "nadam": (torch.optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    "radam": (torch.optim.RAdam, {}),
    "rmsprop": (torch.optim.RMSprop, {}),
    "rmsprop, centered": (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    "rprop": (torch.optim.Rprop, {}),
}


class ListLengths(TorchDispatchMode):
    """Notes how many tensors each op for lists is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.startswith(("_foreach", "_fused")):
            self.seen.append(next(len(given) for given in args if isinstance(given, list | tuple)))
        return func(*args, **(kwargs or {}))
