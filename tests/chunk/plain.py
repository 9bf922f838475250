"""Mixed-precision training without chunks, and with: what they are compared by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # PyTorch's own name for it
from torch.nn.modules.batchnorm import _NormBase

import torch_lms
from tests.unit.trainings import Batch

Optimize = Callable[..., torch.optim.Optimizer]
Made = list[torch.Tensor]


def loss_of(model: nn.Module, batch: Batch, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    x, classes = (one.to(next(model.parameters()).device) for one in batch)
    return F.cross_entropy(model(x.to(dtype) if x.is_floating_point() else x).float(), classes)


class Plain:
    """A 16-bit model, 32-bit masters, and an optimizer of these, as they are written by hand.

    Args:
        model: with 32-bit parameters.
        optimize: makes the optimizer.
        dtype: to compute with.
        on: the device of the masters, if not the model's.
    """

    def __init__(
        self, model: nn.Module, optimize: Optimize, dtype: torch.dtype = torch.bfloat16, on: str | None = None
    ) -> None:
        self.model = model
        wide = {id(p) for m in model.modules() if isinstance(m, _NormBase) for p in m.parameters(recurse=False)}
        self.parameters = list(model.parameters())
        self.masters = [
            (one.detach().clone() if on is None or id(one) in wide else one.detach().to(on, copy=True)).requires_grad_()
            for one in self.parameters
        ]
        for parameter in self.parameters:
            if id(parameter) not in wide:
                parameter.data = parameter.data.to(dtype)
        self.optimizer = optimize(self.masters)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float().to(master.device)
        self.optimizer.step()
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            parameter.copy_(master)


class Chunked:
    """The same by `torch_lms.chunked`."""

    def __init__(self, model: nn.Module, optimize: Optimize, **options: Any) -> None:
        self.model, self.optimizer = torch_lms.chunked(model, optimize(model.parameters()), **options)
        self.parameters = list(self.model.parameters())

    @property
    def masters(self) -> list[torch.Tensor | None]:
        """After all updates so far: what has been updated last may still be on its way to the host."""
        data = self.optimizer._data
        data.settle_masters()
        return [data.masters[data.numbers[one]] for one in self.parameters]

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.optimizer.step()


def train(
    training: Plain | Chunked, batch: Callable[[int], Batch], steps: int, loss: Callable[..., torch.Tensor] = loss_of
) -> Iterator[Made]:
    """The loss, the gradients and the masters of each step."""
    for number in range(steps):
        torch.manual_seed(number)
        training.zero_grad()
        found = loss(training.model, batch(number))
        found.backward()
        gradients = [one.grad.clone() for one in training.parameters if one.grad is not None]
        training.step()
        yield [
            found.detach(),
            *gradients,
            *(master.detach().clone() for master in training.masters if master is not None),
        ]


def same(one: Made, other: Made) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))
