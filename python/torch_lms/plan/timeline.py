"""What a simulation finds: when each op runs, what is in use, and what each direction of the link does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from torch_lms.plan.fields import Range

__all__ = ["IN", "OUT", "Copy", "Timeline"]

OUT = "out"
IN = "in"
_NEGATIVE_TOO = Range(least=-1e18)


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy over the link; times in us since the cycle began, negative for those that the cycle before began."""

    storage: int
    direction: Annotated[str, (OUT, IN)]
    start_us: Annotated[float, _NEGATIVE_TOO]
    end_us: Annotated[float, _NEGATIVE_TOO]


@dataclass(kw_only=True)
class Timeline:
    """One steady cycle. Lists have one element for each place.

    Attributes:
        step_us: from one cycle to the next: until the last op ends, or as long as the host or either direction of the
            link is busy.
        start_us: of the op, or of the first replay before it.
        end_us: of the op.
        wait_us: of compute before the op, for copies in and for memory.
        late_us: by which the op begins later since the host has submitted it later.
        replay_us: spent before the op on making storages again.
        served_us: by which the op is longer since it reads from the host.
        memory_bytes: in use, with copies out that have not ended.
        planned_bytes: the same without these: what the decisions need at least.
        swapped_bytes: on the host.
        dropped_bytes: of dropped storages.
        replayed: storages that are made again before the op, by its place.
        moves: what `copies` are made of.
        out_bytes: of the cycle's copies out.
        in_bytes: of the cycle's copies in.
        recompute_us: all replays.
        waits_us: all waits.
        host_us: the host's time for the cycle; 0 if it is not known.
        excess_bytes: by how much the decisions exceed the limit at the place where that is most; 0 if they keep it.
        host_peak_bytes: the most that the host holds at once, with the copies that stay there all the time.
        wait_of: the time that compute waited for a storage's copies, by storage.
    """

    step_us: float = 0.0
    start_us: list[float] = field(default_factory=list)
    end_us: list[float] = field(default_factory=list)
    wait_us: list[float] = field(default_factory=list)
    late_us: list[float] = field(default_factory=list)
    replay_us: list[float] = field(default_factory=list)
    served_us: list[float] = field(default_factory=list)
    memory_bytes: list[int] = field(default_factory=list)
    planned_bytes: list[int] = field(default_factory=list)
    swapped_bytes: list[int] = field(default_factory=list)
    dropped_bytes: list[int] = field(default_factory=list)
    replayed: Mapping[int, list[int]] = field(default_factory=dict)
    moves: list[tuple[int, str, float, float]] = field(default_factory=list)
    out_bytes: int = 0
    in_bytes: int = 0
    recompute_us: float = 0.0
    waits_us: float = 0.0
    host_us: float = 0.0
    excess_bytes: int = 0
    host_peak_bytes: int = 0
    wait_of: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of_places(cls, count: int) -> Timeline:
        """In which nothing has happened yet at so many places."""
        start_us, end_us, wait_us, late_us, replay_us, served_us = ([0.0] * count for _ in range(6))
        return cls(
            start_us=start_us,
            end_us=end_us,
            wait_us=wait_us,
            late_us=late_us,
            replay_us=replay_us,
            served_us=served_us,
            memory_bytes=[0] * count,
        )

    @property
    def feasible(self) -> bool:
        """Whether the limit is kept at every place."""
        return self.excess_bytes == 0

    @property
    def copies(self) -> list[Copy]:
        """In the order in which each direction does them."""
        return [Copy(*one) for one in self.moves]

    @property
    def peak_bytes(self) -> int:
        """The most that is in use at once."""
        return max(self.memory_bytes, default=0)
