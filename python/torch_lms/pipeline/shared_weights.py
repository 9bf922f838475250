"""Weights that several stages share: one value at the start, one gradient in each step.

The sum runs from the last stage that has the weight to the first, which is the order in which autograd adds on a single
device. With one microbatch it has the same bits, unless a stage other than the last of them uses the weight more than
once: it then adds its own share first. Autocast casts such a weight in each stage, on a single device once: shares are
added there in the lower precision, here in the weight's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from torch_lms.errors import PipelineError
from torch_lms.pipeline.transfers import Channel, sendable, wait_all
from torch_lms.stages.installation import named_tensors
from torch_lms.stages.stage import Stage

__all__ = ["SharedWeights"]

Home = tuple[int, str]


class SharedWeights:
    """This rank's weights that are in other stages as well.

    Args:
        stages: all stages, for what they share.
        own: those of this rank.
        rank_of: the rank of each stage.
        channel: for the transfers.
    """

    def __init__(
        self, stages: Sequence[Stage], own: Sequence[Stage], rank_of: Mapping[int, int], channel: Channel
    ) -> None:
        self._tensors = {(stage.index, name): value for stage in own for name, value in named_tensors(stage)}
        self._rank_of, self._channel = rank_of, channel
        self._rings = _rings(stages)
        self._aside: dict[Home, torch.Tensor] = {}

    def share_values(self) -> None:
        """Gives every stage the first one's value."""
        for homes in self._rings:
            self._pass(homes, {home: self._tensors[home].data for home in homes if home in self._tensors}, copy=True)

    def set_gradients_aside(self) -> None:
        """Takes away gradients of earlier steps, which are sums already; they are added to the new sum."""
        for homes in self._rings:
            for home, value in self._trained(homes).items():
                if value.grad is not None:
                    self._aside[home], value.grad = value.grad, None

    def sum_gradients(self) -> None:
        """Gives the first stage the sum of all stages' gradients; a missing gradient counts as zero.

        `copy_gradients` then gives it to the others.

        Raises:
            PipelineError: for a gradient that is not dense.
        """
        for homes, gradients in self._gradients():
            self._pass(homes[::-1], gradients, copy=False)
            if homes[0] in gradients and homes[0] in self._aside:
                gradients[homes[0]].add_(self._aside[homes[0]])
        self._aside.clear()

    def copy_gradients(self) -> None:
        """Gives every stage the first one's gradient."""
        for homes, gradients in self._gradients():
            self._pass(homes, gradients, copy=True)

    def sums(self) -> set[int]:
        """Parameters whose gradients `sum_gradients` makes, by their identity."""
        return {id(self._tensors[homes[0]]) for homes in self._rings if homes[0] in self._tensors}

    def copies(self) -> set[int]:
        """Parameters whose gradients `copy_gradients` sets, by their identity."""
        own = {id(self._tensors[home]) for homes in self._rings for home in homes[1:] if home in self._tensors}
        return own - self.sums()

    def _gradients(self) -> Iterator[tuple[list[Home], dict[Home, torch.Tensor]]]:
        """The homes of each trained weight that is here, with the gradients that are."""
        for homes in self._rings:
            mine = self._trained(homes)
            for home, value in mine.items():
                if value.grad is None:
                    value.grad = torch.zeros_like(value)
                elif value.grad.layout != torch.strided:
                    raise PipelineError(
                        f"expected a dense gradient of {home[1]}, which several stages share, found one of "
                        f"{value.grad.layout}; make embeddings with sparse=False"
                    )
            if mine:
                yield homes, {home: value.grad for home, value in mine.items() if value.grad is not None}

    def _trained(self, homes: Sequence[Home]) -> dict[Home, nn.Parameter]:
        """Those of a weight's homes that are here; none if it is not trained."""
        mine = {home: self._tensors[home] for home in homes if home in self._tensors}
        found = {home: value for home, value in mine.items() if isinstance(value, nn.Parameter) and value.requires_grad}
        return found if len(found) == len(mine) else {}

    def _pass(self, homes: Sequence[Home], mine: Mapping[Home, torch.Tensor], copy: bool) -> None:
        """Hands a tensor along the homes, each copying it or adding its own."""
        for source, target in itertools.pairwise(homes):
            ranks = self._rank_of[source[0]], self._rank_of[target[0]]
            if source in mine and target in mine:
                if mine[source] is not mine[target]:
                    self._take(mine[target], mine[source], copy)
            elif source in mine:
                wait_all(self._channel.send_all([sendable(mine[source])], ranks[1]))
            elif target in mine:
                buffer = torch.empty_like(mine[target], memory_format=torch.contiguous_format)
                wait_all(self._channel.receive_all([buffer], ranks[0]))
                self._take(mine[target], buffer, copy)

    @staticmethod
    def _take(own: torch.Tensor, other: torch.Tensor, copy: bool) -> None:
        with torch.no_grad():
            own.copy_(other) if copy else own.add_(other)


def _rings(stages: Sequence[Stage]) -> list[list[Home]]:
    """Of each shared tensor its homes, one a stage, from the first stage to the last."""
    seen: set[Home] = set()
    rings = []
    for stage in stages:
        for name, others in stage.shared.items():
            if (stage.index, name) in seen:
                continue
            homes = {stage.index: (stage.index, name)}
            for home in others:
                homes.setdefault(home[0], home)
            tied = {(stage.index, other) for other, same in stage.shared.items() if same == others}
            seen |= {*others, *tied}
            rings.append([homes[index] for index in sorted(homes)])
    return rings
