"""Units in one topological order, and the cuts of that order into contiguous stages.

Cut q lies before position q, so that a stage from cut a to cut b has the positions a to b - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from torch_lms.partition.units import MODEL_INPUT, Units

__all__ = ["UnitSequence"]

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


class UnitSequence:
    """Units in an order, each after its inputs.

    Attributes:
        units: all of them.
        order: number of the unit at each position.
        position: of each unit.
    """

    def __init__(self, units: Units, order: Sequence[int] | Ints | None = None) -> None:
        self.units = units
        self.order: Ints = np.arange(len(units)) if order is None else np.asarray(order, dtype=np.int64)
        self.position: Ints = np.empty(len(units), dtype=np.int64)
        self.position[self.order] = np.arange(len(units))

    def __len__(self) -> int:
        return len(self.units)

    @cached_property
    def time_before_us(self) -> Array:
        """Time of all positions before each cut."""
        return np.concatenate([[0.0], np.cumsum(self.units.time_us[self.order])])

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """Of each value: the position that makes it (-1 for an input of the model) and the last one that reads it."""
        end = len(self)
        return [
            (
                MODEL_INPUT if value.producer == MODEL_INPUT else int(self.position[value.producer]),
                max(end if user == end else int(self.position[user]) for user in value.consumers),
            )
            for value in self.units.values
        ]

    @cached_property
    def cut_forward_bytes(self) -> Array:
        """What crosses each cut on the way forward."""
        return self._crossing([value.forward_bytes for value in self.units.values])

    @cached_property
    def cut_backward_bytes(self) -> Array:
        """What crosses each cut on the way backward."""
        return self._crossing([value.backward_bytes for value in self.units.values])

    def stages(self, cuts: Sequence[int]) -> Ints:
        """The stage of each unit, for the cuts between stages in ascending order."""
        stage_of_position = np.searchsorted(np.asarray(cuts, dtype=np.int64), np.arange(len(self)), side="right")
        stage_of_unit = np.empty(len(self), dtype=np.int64)
        stage_of_unit[self.order] = stage_of_position
        return stage_of_unit

    def _crossing(self, sizes: list[int]) -> Array:
        change = np.zeros(len(self) + 2)
        for (made, last), nbytes in zip(self.spans, sizes, strict=True):
            if made != MODEL_INPUT:
                change[made + 1] += nbytes
                change[last + 1] -= nbytes
        return np.cumsum(change)[: len(self) + 1]
