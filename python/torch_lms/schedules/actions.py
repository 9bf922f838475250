"""Schedules as data: what each rank does, in order, as actions that print and parse.

``2F0`` is the forward of microbatch 0 in stage 2, ``2B0`` its backward; zero-bubble schedules take a backward apart
into ``2I0``, the gradients of the inputs, and ``2W0``, those of the weights. The notation is that of
torch.distributed.pipelining.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch_lms.errors import PipelineError

__all__ = ["BACKWARD", "FORWARD", "INPUT_BACKWARD", "KINDS", "WEIGHT_BACKWARD", "Action", "Schedule"]

FORWARD, BACKWARD, INPUT_BACKWARD, WEIGHT_BACKWARD = "F", "B", "I", "W"
KINDS = (FORWARD, BACKWARD, INPUT_BACKWARD, WEIGHT_BACKWARD)
_PATTERN = re.compile(r"^(\d+)([FBIW])(\d+)$")


@dataclass(frozen=True, order=True)
class Action:
    """One piece of a stage's work on one microbatch."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @staticmethod
    def parse(text: str) -> Action:
        """Reads what ``str`` prints.

        Raises:
            PipelineError: if it is no action.
        """
        found = _PATTERN.match(text.strip())
        if not found:
            raise PipelineError(f"expected an action such as '2F0', found {text!r}; kinds are {', '.join(KINDS)}")
        return Action(int(found.group(1)), found.group(2), int(found.group(3)))


@dataclass(frozen=True)
class Schedule:
    """The work of all ranks.

    Attributes:
        name: of the rule that made it.
        stages: how many there are; stage ``s`` is on rank ``s % ranks`` unless `rank_of` says otherwise.
        microbatches: how many there are.
        ranks: the actions of each rank in order.
    """

    name: str
    stages: int
    microbatches: int
    ranks: tuple[tuple[Action, ...], ...]

    @property
    def rank_of(self) -> Mapping[int, int]:
        """The rank of each stage, as found in the actions."""
        return {action.stage: rank for rank, actions in enumerate(self.ranks) for action in actions}

    def __iter__(self) -> Iterator[tuple[int, Action]]:
        return ((rank, action) for rank, actions in enumerate(self.ranks) for action in actions)

    def __str__(self) -> str:
        """One line for each rank, actions apart by commas."""
        return "\n".join(",".join(map(str, actions)) for actions in self.ranks)

    @staticmethod
    def parse(text: str, name: str = "parsed") -> Schedule:
        """Reads what ``str`` prints; empty cells (idle steps) are passed over.

        Raises:
            PipelineError: if a cell is no action, or there is none at all.
        """
        lines = [line for line in text.strip().splitlines() if line.strip()]
        return Schedule.of(name, [[Action.parse(cell) for cell in line.split(",") if cell.strip()] for line in lines])

    @staticmethod
    def of(name: str, ranks: Sequence[Sequence[Action]]) -> Schedule:
        """A schedule whose sizes follow from its actions.

        Raises:
            PipelineError: if there is no action.
        """
        actions = [action for own in ranks for action in own]
        if not actions:
            raise PipelineError("expected at least one action, found none; give a line for each rank")
        stages = 1 + max(action.stage for action in actions)
        microbatches = 1 + max(action.microbatch for action in actions)
        return Schedule(name, stages, microbatches, tuple(tuple(own) for own in ranks))

    @staticmethod
    def from_torch(name: str, order: Mapping[int, Sequence[Any]]) -> Schedule:
        """Takes over the ``pipeline_order`` of a schedule of torch.distributed.pipelining."""
        ranks = []
        for rank in sorted(order):
            cells = [cell for cell in order[rank] if cell is not None and cell.computation_type.value in KINDS]
            ranks.append([Action.parse(str(cell)) for cell in cells])
        return Schedule.of(name, ranks)
