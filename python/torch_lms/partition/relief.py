"""Memory that a planner may lower at a cost in time: what a stage needs, and who may lower it.

Note [Two looks]: the partition algorithms look at many stages at once, so what a stage would take is estimated by a
formula, for arrays of one shape with one element for each stage (scalars work too). That only says which cuts are worth
a closer look. What the last few of them take is found by the simulator of ``torch_lms.plan``, which runs each device's
step with what its stages give up (``device_step``), and decides what that is. Where swaps come last, both look without
them first, and with them only where nothing fits so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from torch_lms.partition.link_spec import LinkSpec
from torch_lms.partition.moments import InFlight, Moment
from torch_lms.partition.offers import NO_OFFERS, Offers

__all__ = [
    "KEEP_ALL",
    "Choice",
    "GivenUp",
    "KeepAll",
    "MemoryRelief",
    "Relieved",
    "StageNeed",
    "StageRelief",
    "relieve_device",
]

Array = NDArray[np.float64]


class GivenUp(NamedTuple):
    """A segment that is given up: the number of its stage, its own among the stage's offers, and by which way."""

    stage: int
    segment: int
    swapped: bool


Choice = tuple[GivenUp, ...]


@dataclass(frozen=True, kw_only=True)
class StageNeed:
    """What stages take if everything is kept.

    Attributes:
        time_us: of one microbatch, forward and backward, on the stage's device.
        forward_us: of it.
        static_bytes: of parameters, gradients and optimizer state.
        held_bytes: for each microbatch in flight.
        transient_bytes: working space.
        kept_bytes: of gradients, for each microbatch that is half done; see Note [Half done] in ``moments``.
        freed_bytes: of ``held_bytes``, what a backward of inputs frees.
        input_transient_bytes: working space of a backward of inputs, besides all that it keeps.
        in_flight: microbatches.
        moments: those of the stage by itself that may be the worst; empty for one with as many as are in flight, none
            half done.
        speed: of the device.
        replays: how often what is computed again is, for each microbatch.
        half_done: microbatches at most that are in the two parts of their backward: all that they gave up is there.
        offers: the segments that stages may give up.
        coarser: runs of these that they may give up instead.
        first: the cut before each stage, in the positions of ``offers``.
        end: the cut after each stage.
    """

    time_us: Array
    forward_us: Array
    static_bytes: Array
    held_bytes: Array
    transient_bytes: Array
    in_flight: int
    kept_bytes: Any = 0.0
    freed_bytes: Any = 0.0
    input_transient_bytes: Any = 0.0
    moments: tuple[Moment, ...] = ()
    speed: float = 1.0
    replays: int = 1
    half_done: int = 0
    offers: Offers = NO_OFFERS
    coarser: tuple[Offers, ...] = ()
    first: Any = 0
    end: Any = 0

    @property
    def memory_bytes(self) -> Array:
        """All of it together, at the worst moment."""
        most = np.maximum.reduce([self.bytes_of(one.held[0]) + self.working_bytes(one) for one in self.worst_moments])
        total: Array = self.static_bytes + most
        return total

    @property
    def worst_moments(self) -> tuple[Moment, ...]:
        """``moments``, or the one that stands for them."""
        return self.moments or (Moment((InFlight(self.in_flight, self.in_flight, 0),), 0, inputs=False),)

    def working_bytes(self, moment: Moment) -> Array:
        """What runs takes."""
        found: Array = self.input_transient_bytes if moment.inputs else self.transient_bytes
        return found

    def bytes_of(self, held: InFlight) -> Array:
        """What some microbatches take."""
        left = self.held_bytes - self.freed_bytes
        total: Array = held.all * left + held.whole * self.freed_bytes + held.keeping * self.kept_bytes
        return total


@dataclass(frozen=True, kw_only=True)
class Relieved:
    """What stages take after relief.

    Attributes:
        time_us: of one microbatch.
        memory_bytes: at the worst moment.
    """

    time_us: Any
    memory_bytes: Any


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
    def of(cls, offers: Offers, given_up: Collection[GivenUp]) -> StageRelief:
        """What was chosen for one stage."""
        recomputed, swapped = (
            tuple(
                offers.segments[number].names
                for number in sorted(one.segment for one in given_up if one.swapped is way)
            )
            for way in (False, True)
        )
        return cls(recomputed=recomputed, swapped=swapped)


class MemoryRelief(Protocol):
    """Lowers the memory of stages that do not fit, and says what that costs; see Note [Two looks]."""

    def relieve(self, need: StageNeed, usable_bytes: Any) -> Relieved:
        """About what each stage takes after it was made to fit as well as it can be.

        A stage that fits must be left as it is. Time never falls and memory never rises.
        """
        ...

    def ways(self, needs: Mapping[int, StageNeed]) -> Sequence[Sequence[Choice]]:
        """What the stages of one device, by their numbers, may give up.

        Each way is a sequence of choices, of which each takes less memory than the one before. Of each way the first
        choice that fits is wanted. Ways that follow each other are alike: they are not all tried.
        """
        ...

    @property
    def host_link(self) -> LinkSpec | None:
        """The way of swapped segments; None where nothing is swapped."""
        ...

    @property
    def swap_last(self) -> bool:
        """Whether ways that swap are tried only where no other fits; `relieve` must estimate accordingly."""
        ...


class KeepAll:
    """No swapping, no recomputing."""

    host_link = None
    swap_last = False

    def relieve(self, need: StageNeed, usable_bytes: Any) -> Relieved:
        """As it is."""
        return Relieved(time_us=need.time_us, memory_bytes=need.memory_bytes)

    def ways(self, needs: Mapping[int, StageNeed]) -> Sequence[Sequence[Choice]]:
        """None."""
        return ()


KEEP_ALL = KeepAll()


def relieve_device(
    relief: MemoryRelief, needs: Sequence[StageNeed], together_bytes: Any, usable_bytes: float
) -> tuple[list[Relieved], Any]:
    """About what the stages of one device take after they were made to fit it as well as they can be.

    Stages that fit together stay as they are. Else each in turn may take what the others leave. What is then counted is
    the sum of the stages' own worst moments, if that is less than their worst moment together was.

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
            )
    return found, np.minimum(together_bytes, sum(one.memory_bytes for one in found))
