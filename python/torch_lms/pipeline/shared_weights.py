"""Weights that several stages share: one value at the start, one gradient in each step.

The sum runs from the last stage that has the weight to the first, which is the order in which autograd adds on a single
device. With one microbatch it has the same bits, unless a stage other than the last of them uses the weight more than
once: it then adds its own share first.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torch_lms.pipeline.liveness import Liveness
from torch_lms.pipeline.transfers import wait_all
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
        group: for the transfers.
        liveness: to end a wait for a rank that has died.
    """

    def __init__(
        self, stages: Sequence[Stage], own: Sequence[Stage], rank_of: Mapping[int, int], group: Any, liveness: Liveness
    ) -> None:
        self._tensors = {(stage.index, name): value for stage in own for name, value in named_tensors(stage)}
        self._rank_of, self._group, self._liveness = rank_of, group, liveness
        self._rings = _rings(stages)
        self._aside: dict[Home, torch.Tensor] = {}

    def share_values(self) -> None:
        """Gives every stage the first one's value."""
        for homes in self._rings:
            self._pass(homes, {home: self._tensors[home].data for home in homes if home in self._tensors}, copy=True)

    def set_gradients_aside(self) -> None:
        """Takes away gradients of earlier steps, which are sums already; `sum_gradients` adds them again."""
        for home in {home for homes in self._rings for home in homes if home in self._tensors}:
            value = self._tensors[home]
            if value.grad is not None:
                self._aside[home], value.grad = value.grad, None

    def sum_gradients(self) -> None:
        """Gives every stage the sum of all stages' gradients; a missing gradient counts as zero."""
        for homes in self._rings:
            mine = {home: self._tensors[home] for home in homes if home in self._tensors}
            if not mine or not all(isinstance(value, nn.Parameter) and value.requires_grad for value in mine.values()):
                continue
            for value in mine.values():
                if value.grad is None:
                    value.grad = torch.zeros_like(value)
            gradients = {home: value.grad for home, value in mine.items() if value.grad is not None}
            self._pass(homes[::-1], gradients, copy=False)
            self._pass(homes, gradients, copy=True)
            for home, gradient in gradients.items():
                if home in self._aside:
                    gradient.add_(self._aside.pop(home))

    def _pass(self, homes: Sequence[Home], mine: Mapping[Home, torch.Tensor], copy: bool) -> None:
        """Hands a tensor along the homes, each copying it or adding its own."""
        for source, target in itertools.pairwise(homes):
            ranks = self._rank_of[source[0]], self._rank_of[target[0]]
            if source in mine and target in mine:
                if mine[source] is not mine[target]:
                    self._take(mine[target], mine[source], copy)
            elif source in mine:
                leaving = mine[source].contiguous()
                wait_all([(leaving, dist.isend(leaving, ranks[1], group=self._group))], self._liveness)
            elif target in mine:
                buffer = torch.empty_like(mine[target], memory_format=torch.contiguous_format)
                wait_all([(buffer, dist.irecv(buffer, ranks[0], group=self._group))], self._liveness)
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
