"""What cuts the models of ``pipeline_gpt``: the planner, within a share of the least memory, or by hand."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from torch import nn
from torch.utils.checkpoint import checkpoint

from torch_lms.errors import PartitionError
from torch_lms.partition import least_caps
from torch_lms.partition import partition as cut
from torch_lms.partition.algorithms.block import BalanceByTime
from torch_lms.partition.interface import Partition, PartitionProblem, evaluate

__all__ = ["AUTOMATIC", "HAND", "ByHand", "Keeping", "TorchGPipe", "Within", "find_algorithm", "splits_by_hand"]

GIB = 1 << 30
AUTOMATIC, HAND, TORCHGPIPE = "automatic", "hand@", "torchgpipe"
BLOCK = re.compile(r"^(?:.*\.)?(?:blocks|layers|block)\.\d+(?=\.|$)")
_TIMED = 40  # as many splits are timed by the planner, at most


@dataclass(frozen=True)
class ByHand:
    """Gives each stage a number of blocks: everything before the first line of a stage's first block is before it."""

    blocks: tuple[int, ...]
    name: str = "by hand"
    source: str = "the words of the command"

    def partition(self, problem: PartitionProblem) -> Partition:
        """The partition with these blocks.

        Raises:
            PartitionError: if the model has another number of blocks, or there is another number of stages.
        """
        first = _first_units(problem)
        if sum(self.blocks) != len(first) or len(self.blocks) != problem.stages:
            raise PartitionError(
                f"expected {len(first)} blocks in {problem.stages} stages, found {'/'.join(map(str, self.blocks))}; "
                "choose another split"
            )
        borders = [first[blocks] for blocks in np.cumsum(self.blocks)[:-1]]
        stage_of_unit = np.searchsorted(borders, np.arange(len(problem.units)), side="right")
        return evaluate(problem, stage_of_unit, algorithm=self.name, reason="as given")


class TorchGPipe:
    """As torchgpipe cuts and checkpoints: block partition by time, and each stage computed again in its backward."""

    name = "as torchgpipe"
    source = "torchgpipe, balance_by_time and checkpoint='always'"

    def partition(self, problem: PartitionProblem) -> Partition:
        """The blocks."""
        return BalanceByTime().partition(problem)

    def checkpoint(self, stages: Sequence[nn.Module]) -> None:
        """Has stages keep nothing but their inputs."""
        for stage in stages:
            stage.forward = partial(checkpoint, stage.forward, use_reentrant=False)


@dataclass
class Within:
    """Another algorithm where each device has a share of the least memory in which contiguous stages fit.

    Attributes:
        cap_gib: the largest of what they have, once it has cut.
    """

    share: float
    algorithm: Any
    cap_gib: float | None = None
    name: str = "within a share of the least memory"
    source: str = "the words of the command"

    def partition(self, problem: PartitionProblem) -> Partition:
        """The other algorithm's partition within these caps."""
        wide = _capped(problem, 1.0)
        tight = _capped(wide, self.share * least_caps(wide).factor)
        self.cap_gib = max(device.memory_cap_bytes or 0 for device in tight.devices) / GIB
        return cut(tight, self.algorithm)


def _capped(problem: PartitionProblem, factor: float) -> PartitionProblem:
    """With devices that have a part of their memory, or of a TiB where they name none."""
    devices = tuple(
        replace(device, memory_cap_bytes=int(factor * (device.memory_cap_bytes or 1 << 40)))
        for device in problem.devices
    )
    return replace(problem, devices=devices)


def find_algorithm(split: str, automatic: Any) -> Any:
    """What cuts: ``automatic``, ``automatic@70``, ``torchgpipe``, or blocks of each stage.

    Args:
        split: a word of the command.
        automatic: the algorithm that the first two stand for.
    """
    word, _, percent = split.partition("@")
    if word == TORCHGPIPE:
        return TorchGPipe()
    if word != AUTOMATIC:
        return ByHand(tuple(int(blocks) for blocks in word.split("/")))
    return Within(float(percent) / 100, automatic) if percent else automatic


def _first_units(problem: PartitionProblem) -> list[int]:
    """Of each block the first unit."""
    module_of = {node.name: node.module for node in problem.graph.nodes}
    first: dict[str, int] = {}
    for unit, names in enumerate(problem.units.members):
        match = BLOCK.match(module_of[names[0]])
        if match is not None:
            first.setdefault(match.group(), unit)
    return list(first.values())


@dataclass
class Keeping:
    """Another algorithm; remembers what it was asked.

    Attributes:
        problem: the last one; None where another rank cuts.
    """

    algorithm: Any
    problem: PartitionProblem | None = None
    name: str = "another"
    source: str = "the words of the command"

    def partition(self, problem: PartitionProblem) -> Partition:
        """The other algorithm's partition."""
        self.problem = problem
        return cut(problem, self.algorithm)


def splits_by_hand(problem: PartitionProblem, percent: float, most: int = 6) -> list[str]:
    """The splits in whole blocks whose predicted steps are the shortest.

    Args:
        problem: what is split.
        percent: by which a step may be longer than the shortest of these.
        most: how many at most.
    """
    first = _first_units(problem)
    before = np.concatenate([[0.0], np.cumsum(problem.units.time_us)])
    borders = [0, *first[1:], len(problem.units)]

    def longest_us(blocks: tuple[int, ...]) -> float:
        at = [borders[done] for done in (0, *np.cumsum(blocks))]
        return float(max(before[end] - before[begin] for begin, end in itertools.pairwise(at)))

    likely = sorted(_ways(len(first), problem.stages), key=longest_us)[:_TIMED]
    step_us = {blocks: ByHand(blocks).partition(problem).figures.step.step_us for blocks in likely}
    limit_us = min(step_us.values()) * (1 + percent / 100)
    near = sorted((blocks for blocks in likely if step_us[blocks] <= limit_us), key=step_us.__getitem__)
    return ["/".join(map(str, blocks)) for blocks in near[:most]]


def _ways(blocks: int, stages: int) -> Iterator[tuple[int, ...]]:
    """All ways to give each stage at least one block."""
    for inner in itertools.combinations(range(1, blocks), stages - 1):
        yield tuple(end - begin for begin, end in itertools.pairwise((0, *inner, blocks)))
