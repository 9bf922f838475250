"""Gradients of parameters that every rank has whole."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from torch_lms.chunk.ranks import Ranks

__all__ = ["WholeGradients"]


class WholeGradients:
    """Becomes the mean over all ranks, in each backward by itself: to a mean nothing may be added that is none yet.

    Not thread-safe: the lock of its owner guards it. All ranks must call `reduce` as often.

    Args:
        parameters: by number.
        ranks: that have them.
    """

    def __init__(self, parameters: Mapping[int, torch.nn.Parameter], ranks: Ranks) -> None:
        self._parameters = parameters
        self._ranks = ranks
        self._elsewhere: dict[int, torch.Tensor] = {}  # means of backwards in which none came here
        self._before: dict[int, torch.Tensor] = {}  # of backwards before the one that runs

    def __contains__(self, number: object) -> bool:
        return number in self._parameters

    def hide(self) -> None:
        """A backward begins."""
        for number, parameter in self._parameters.items():
            if parameter.grad is not None:
                self._before[number] = parameter.grad
                parameter.grad = None

    def have_come(self) -> list[int]:
        """Those with a gradient of the backward that runs."""
        return [number for number, parameter in self._parameters.items() if parameter.grad is not None]

    def reduce(self) -> None:
        """It has ended."""
        if not self._parameters:
            return
        parameters = list(self._parameters.values())
        came = [torch.zeros_like(one) if one.grad is None else one.grad for one in parameters]
        mean = torch.cat([one.flatten() for one in came]).div_(self._ranks.size)
        self._ranks.sum(mean)
        parts = mean.split([one.numel() for one in came])
        for (number, one), part in zip(self._parameters.items(), parts, strict=True):
            gradient = part.view_as(one)
            if (before := self._before.pop(number, None)) is not None:
                one.grad = before.add_(gradient)
                continue
            elsewhere = self._elsewhere.pop(number, None)
            gradient = gradient.clone() if elsewhere is None else elsewhere.add_(gradient)
            if one.grad is None:
                self._elsewhere[number] = gradient
            else:
                one.grad.copy_(gradient)

    def show(self, number: int) -> None:
        """A gradient has come, here or elsewhere."""
        if self._parameters[number].grad is None:
            self._parameters[number].grad = self._elsewhere.pop(number)

    def restore(self) -> None:
        """A backward has failed."""
        for number, gradient in self._before.items():
            self._parameters[number].grad = gradient
        self._before.clear()

    def forget(self) -> None:
        """The program has dropped all of them."""
        self._elsewhere.clear()
