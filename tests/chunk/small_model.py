"""A small model in chunks, and a step of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # PyTorch's own name for it

import torch_lms
from tests.unit.trainings import Batch

X = torch.rand(16, 64, generator=torch.Generator().manual_seed(0))
CLASSES = torch.arange(16) % 8
STILL = partial(torch.optim.SGD, lr=0.0)  # its steps change nothing
ADAMW = partial(torch.optim.AdamW, lr=1e-2)


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))


def chunked(model: nn.Module | None = None, optimize: Callable[..., Any] = ADAMW, **options: Any) -> tuple[Any, Any]:
    model = make() if model is None else model
    return torch_lms.chunked(model, optimize(model.parameters()), **options)


def batch(_: int) -> Batch:
    return X, CLASSES


def loss_of(model: nn.Module) -> torch.Tensor:
    return F.cross_entropy(model(X).float(), CLASSES)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss_of(model).backward()
    optimizer.step()
