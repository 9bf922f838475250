"""Memory that a planner may lower at a cost in time: what a stage needs, and who may lower it.

The partition algorithms look at many stages at once, so everything here is an array of one shape, one element for each
stage that is looked at; scalars work too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from torch_lms.partition.offers import NO_OFFERS, Offers

__all__ = [
    "KEEP_ALL",
    "KEPT",
    "RECOMPUTED",
    "SWAPPED",
    "KeepAll",
    "MemoryRelief",
    "Relieved",
    "StageNeed",
    "StageRelief",
    "relieve_device",
]

Array = NDArray[np.float64]
Kinds = NDArray[np.int8]
KEPT, RECOMPUTED, SWAPPED = range(3)


@dataclass(frozen=True, kw_only=True)
class StageNeed:
    """What stages take if everything is kept.

    Attributes:
        time_us: of one microbatch, forward and backward, on the stage's device.
        forward_us: of it.
        static_bytes: of parameters, gradients and optimizer state.
        held_bytes: for each microbatch in flight.
        transient_bytes: working space.
        in_flight: microbatches.
        speed: of the device.
        offers: the segments that stages may give up.
        first: the cut before each stage, in the positions of ``offers``.
        end: the cut after each stage.
    """

    time_us: Array
    forward_us: Array
    static_bytes: Array
    held_bytes: Array
    transient_bytes: Array
    in_flight: int
    speed: float = 1.0
    offers: Offers = NO_OFFERS
    first: Any = 0
    end: Any = 0

    @property
    def memory_bytes(self) -> Array:
        """All of it together."""
        total: Array = self.static_bytes + self.in_flight * self.held_bytes + self.transient_bytes
        return total


@dataclass(frozen=True, kw_only=True)
class Relieved:
    """What stages take after relief.

    Attributes:
        time_us: of one microbatch.
        memory_bytes: at the worst moment.
        kinds: what becomes of each offer, one row each, in those stages that were looked at; empty where none was.
    """

    time_us: Any
    memory_bytes: Any
    kinds: Kinds = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int8))


@dataclass(frozen=True, kw_only=True)
class StageRelief:
    """What one stage gives up to fit: the names of the nodes of each segment, in order.

    Attributes:
        recomputed: computed again before their backward.
        swapped: on the host between their forward and their backward.
    """

    recomputed: tuple[tuple[str, ...], ...] = ()
    swapped: tuple[tuple[str, ...], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.recomputed or self.swapped)

    def __str__(self) -> str:
        counts = (len(self.recomputed), "computed again"), (len(self.swapped), "swapped")
        return " and ".join(f"{count} segment{'s' * (count > 1)} {what}" for count, what in counts if count)

    @classmethod
    def of(cls, offers: Offers, relieved: Relieved) -> StageRelief:
        """What was chosen for one stage."""
        chosen = relieved.kinds[:, 0].tolist() if relieved.kinds.size else []
        pairs = list(zip(offers.segments, chosen, strict=False))
        return cls(
            recomputed=tuple(one.names for one, kind in pairs if kind == RECOMPUTED),
            swapped=tuple(one.names for one, kind in pairs if kind == SWAPPED),
        )


class MemoryRelief(Protocol):
    """Lowers the memory of stages that do not fit, and says what that costs."""

    def relieve(self, need: StageNeed, usable_bytes: Any) -> Relieved:
        """Time and memory of each stage after it was made to fit as well as it can be.

        A stage that fits must be left as it is. Time never falls and memory never rises.
        """
        ...


class KeepAll:
    """No swapping, no recomputing."""

    def relieve(self, need: StageNeed, usable_bytes: Any) -> Relieved:
        """As it is."""
        return Relieved(time_us=need.time_us, memory_bytes=need.memory_bytes)


KEEP_ALL = KeepAll()


def relieve_device(
    relief: MemoryRelief, needs: Sequence[StageNeed], together_bytes: Any, usable_bytes: float
) -> tuple[list[Relieved], Any]:
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
        What each stage takes, and the memory of all together.
    """
    found = [KEEP_ALL.relieve(need, usable_bytes) for need in needs]
    crowded = together_bytes > usable_bytes
    if np.any(crowded):
        for index, need in enumerate(needs):
            left = usable_bytes - (sum(one.memory_bytes for one in found) - found[index].memory_bytes)
            made = relief.relieve(need, left)
            found[index] = Relieved(
                time_us=np.where(crowded, made.time_us, need.time_us),
                memory_bytes=np.where(crowded, made.memory_bytes, need.memory_bytes),
                kinds=made.kinds,
            )
    return found, np.minimum(together_bytes, sum(one.memory_bytes for one in found))
