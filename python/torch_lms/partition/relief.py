"""The place for swap and recompute inside a stage: memory that a planner may lower at a cost in time.

The partition algorithms look at many stages at once, so everything here is an array of one shape, one element for each
stage that is looked at; scalars work too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["KEEP_ALL", "KeepAll", "MemoryRelief", "StageNeed"]

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class StageNeed:
    """What stages take if everything is kept.

    Attributes:
        time_us: of one microbatch, forward and backward, on the stage's device.
        static_bytes: of parameters, gradients and optimizer state.
        held_bytes: for each microbatch in flight.
        transient_bytes: working space.
        in_flight: microbatches.
    """

    time_us: Array
    static_bytes: Array
    held_bytes: Array
    transient_bytes: Array
    in_flight: int

    @property
    def memory_bytes(self) -> Array:
        """All of it together."""
        total: Array = self.static_bytes + self.in_flight * self.held_bytes + self.transient_bytes
        return total


class MemoryRelief(Protocol):
    """Lowers the memory of stages that do not fit, and says what that costs."""

    def relieve(self, need: StageNeed, usable_bytes: float) -> tuple[Any, Any]:
        """Time and memory of each stage after it was made to fit as well as it can be.

        A stage that fits must be left as it is. Time never falls and memory never rises.
        """
        ...


class KeepAll:
    """No swapping, no recomputing."""

    def relieve(self, need: StageNeed, usable_bytes: float) -> tuple[Array, Array]:
        """As it is."""
        return need.time_us, need.memory_bytes


KEEP_ALL = KeepAll()
