"""The place for swap and recompute inside a stage: memory that a planner may lower at a cost in time.

The partition algorithms look at many stages at once, so everything here is an array of one shape, one element for each
stage that is looked at; scalars work too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["KEEP_ALL", "KeepAll", "MemoryRelief", "StageNeed", "relieve_device"]

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


def relieve_device(
    relief: MemoryRelief, needs: Sequence[StageNeed], together_bytes: Any, usable_bytes: float
) -> tuple[list[Any], list[Any], Any]:
    """Makes the stages of one device fit it as well as they can be.

    Stages that fit together stay as they are. Else each in turn may take what the others leave. What is then counted is
    the sum of the stages' own worst moments, if that is less than their worst moment together was: no one says how much
    of what a stage gives up it would hold at another's worst moment.

    Args:
        relief: what lowers a stage's memory.
        needs: of each stage.
        together_bytes: at the worst moment of all stages together, as they are.
        usable_bytes: of the device.

    Returns:
        The time of each stage, the memory of each stage, and that of all together.
    """
    times: list[Any] = [need.time_us for need in needs]
    memories: list[Any] = [need.memory_bytes for need in needs]
    crowded = together_bytes > usable_bytes
    if np.any(crowded):
        for index, need in enumerate(needs):
            left = usable_bytes - (sum(memories) - memories[index])
            time_us, memory = relief.relieve(need, left)
            times[index] = np.where(crowded, time_us, times[index])
            memories[index] = np.where(crowded, memory, memories[index])
    return times, memories, np.minimum(together_bytes, sum(memories))
