"""A plan as a document: what is decided for every storage and why, what it should cost, and how to draw it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import ClassVar

from torch_lms.errors import PlanError
from torch_lms.memory_sizes import GIB, in_gib
from torch_lms.plan.decision import DECISIONS, RECOMPUTE, Decision
from torch_lms.plan.fields import Document
from torch_lms.plan.placeholders import Placeholder
from torch_lms.plan.timeline import IN, Copy
from torch_lms.plan.trace import TraceOp, check_ops, check_storages

__all__ = ["Actions", "Measured", "MethodResult", "Plan", "PlanTimeline", "PlannedStorage", "Predicted"]


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What the simulator says of the plan, for one steady cycle.

    Attributes:
        plain_us: a cycle without a limit.
        step_us: a cycle with the plan.
        lower_bound_us: no plan of this kind is faster.
        peak_bytes: the most that is in use at once.
        plain_peak_bytes: the same without a plan.
        out_bytes: of all copies out.
        in_bytes: of all copies in.
        recompute_us: all replays.
        waits_us: of compute, for copies and memory.
        host_peak_bytes: the most that the host holds.
    """

    plain_us: float
    step_us: float
    lower_bound_us: float
    peak_bytes: int
    plain_peak_bytes: int
    out_bytes: int = 0
    in_bytes: int = 0
    recompute_us: float = 0.0
    waits_us: float = 0.0
    host_peak_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a cycle under the plan took.

    Attributes:
        step_us: of a cycle.
        peak_bytes: the most that was in use at once.
    """

    step_us: float
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class MethodResult:
    """What one planning method came to.

    Attributes:
        name: of the method.
        step_us: its simulated cycle; None if it met no limit or was left out.
        note: why, in words; empty if all is well.
    """

    name: str
    step_us: float | None
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStorage(Decision):
    """A decision, with its reasons.

    Attributes:
        reason: why, in one sentence.
        price_us: the time that this costs in a cycle.
        bytes: the storage's size.
        op: that made it; empty for a storage that exists at the start.
        module: path of the module.
        line: of the user's code.
    """

    reason: str
    price_us: float
    bytes: int
    op: str
    module: str
    line: str


@dataclass(frozen=True, kw_only=True)
class PlanTimeline:
    """The predicted cycle, to be drawn. Lists have one element for each place, times begin with the cycle.

    Attributes:
        start_us: of the op, or of the first replay before it.
        end_us: of the op.
        replay_us: spent before the op on making storages again.
        memory_bytes: in use, placeholders included.
        leaving_bytes: of these, what copies out that have not ended still read.
        swapped_bytes: on the host.
        dropped_bytes: of dropped storages.
        plain_bytes: in use without the plan.
        copies: over the link.
    """

    start_us: tuple[float, ...] = ()
    end_us: tuple[float, ...] = ()
    replay_us: tuple[float, ...] = ()
    memory_bytes: tuple[int, ...] = ()
    leaving_bytes: tuple[int, ...] = ()
    swapped_bytes: tuple[int, ...] = ()
    dropped_bytes: tuple[int, ...] = ()
    plain_bytes: tuple[int, ...] = ()
    copies: tuple[Copy, ...] = ()


@dataclass(slots=True)
class Actions:
    """What the core does after one place: ids of the storages to drop, to page out and to begin to bring in."""

    drop: list[int] = field(default_factory=list)
    pageout: list[int] = field(default_factory=list)
    prefetch: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Plan(Document):
    """What happens to every storage of a cycle under a limit.

    Attributes:
        signature: of the trace that it was made for.
        device: of the trace.
        limit_bytes: that it keeps.
        predicted: by the simulator.
        measured: when it was carried out; None before.
        method: that won.
        methods: all of them.
        decisions: for every storage; several for one that leaves several times.
        placeholders: blocks that are held for the largest storages.
        ops: by place.
        recurring: by storage, whether it lives across cycles.
        timeline: predicted.
    """

    FORMAT: ClassVar[str] = "torch_lms.plan"
    VERSION: ClassVar[int] = 3
    OLDEST: ClassVar[int] = 2

    signature: str
    device: str
    limit_bytes: int
    predicted: Predicted
    measured: Measured | None = None
    method: str
    methods: tuple[MethodResult, ...]
    decisions: tuple[PlannedStorage, ...]
    placeholders: tuple[Placeholder, ...] = ()
    ops: tuple[TraceOp, ...]
    recurring: tuple[bool, ...]
    timeline: PlanTimeline

    def __post_init__(self) -> None:
        places, storages = len(self.ops), len(self.recurring)
        check_ops(self.ops, storages)
        check_storages((one.storage for one in self.decisions), storages, "decisions")
        check_storages((one.storage for one in self.timeline.copies), storages, "timeline.copies")
        for number, one in enumerate(self.decisions):
            for name, place in (("out_after", one.out_after), ("in_after", one.in_after)):
                if place is not None and not 0 <= place < places:
                    raise PlanError(f"expected a place below {places} at decisions[{number}].{name}, found {place}")
        for number, held in enumerate(self.placeholders):
            for name, place, least, most in (
                ("until", held.until, 1, places - 1),
                ("since", held.since, 0, held.until - 1),
            ):
                if not least <= place <= most:
                    raise PlanError(
                        f"expected a place from {least} to {most} at placeholders[{number}].{name}, found {place}"
                    )
        lists = (getattr(self.timeline, one.name) for one in fields(self.timeline) if one.name != "copies")
        if (lengths := {len(one) for one in lists}) != {places}:
            raise PlanError(f"expected {places} elements in each list of timeline, found {lengths}")

    def actions(self) -> Mapping[int, Actions]:
        """What the core does after each place; places without an action are left out."""
        found: dict[int, Actions] = defaultdict(Actions)
        for one in self.decisions:
            if one.out_after is not None:
                after = found[one.out_after]
                (after.drop if one.decision == RECOMPUTE else after.pageout).append(one.storage)
            if one.in_after is not None:
                found[one.in_after].prefetch.append(one.storage)
        starts = {copy.storage: copy.start_us for copy in self.timeline.copies if copy.direction == IN}
        for after in found.values():  # the core begins them in this order
            after.prefetch.sort(key=lambda storage: starts.get(storage, 0.0))
        return dict(sorted(found.items()))

    def room_bytes(self) -> list[int]:
        """By place, what copies out that have not ended may have in use. See Note [Copies out in a plan's peak]."""
        peak, line = self.predicted.peak_bytes, self.timeline
        pairs = zip(line.memory_bytes, line.leaving_bytes, strict=True)
        return [max(0, peak - used + leaving) for used, leaving in pairs]

    def __str__(self) -> str:
        """What is decided in total, and what it is predicted to cost, as a short table."""
        known = self.predicted
        lines = [
            f"limit {in_gib(self.limit_bytes)}, predicted peak {in_gib(known.peak_bytes)} of "
            f"{in_gib(known.plain_peak_bytes)}, method {self.method}",
            f"step {known.step_us / 1e3:.1f} ms (plain {known.plain_us / 1e3:.1f}, "
            f"bound {known.lower_bound_us / 1e3:.1f}): recompute {known.recompute_us / 1e3:.1f}, "
            f"waits {known.waits_us / 1e3:.1f}, out {in_gib(known.out_bytes)}, in {in_gib(known.in_bytes)}",
        ]
        if self.measured is not None:
            found = self.measured
            lines.append(f"measured: {found.step_us / 1e3:.1f} ms, peak {in_gib(found.peak_bytes)}")
        lines.append(f"{'decision':<16}{'storages':>10}{'GiB':>10}{'price (ms)':>12}")
        for kind in DECISIONS:
            mine = [one for one in self.decisions if one.decision == kind]
            if mine:
                size, price = sum(one.bytes for one in mine), sum(one.price_us for one in mine)
                lines.append(f"{kind:<16}{len(mine):>10}{size / GIB:>10.2f}{price / 1e3:>12.2f}")
        return "\n".join(lines)
