"""A plan as a document: what is decided for every storage and why, what it should cost, and how to draw it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torch_lms.errors import PlanError
from torch_lms.plan.decision import DECISIONS, DROP_UNCHANGED, HOST, RECOMPUTE, Decision
from torch_lms.plan.fields import Fields, read_document
from torch_lms.plan.timeline import IN, OUT, Copy

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = [
    "Actions",
    "Measured",
    "MethodResult",
    "Plan",
    "PlanTimeline",
    "PlannedOp",
    "PlannedStorage",
    "Predicted",
]

FORMAT = "torch_lms.plan"
VERSION = 1
_GIB = 2**30


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
class PlannedStorage:
    """One decision.

    Attributes:
        storage: its id in the trace.
        decision: keep, swap, recompute, drop_unchanged or host.
        out_after: place after which it leaves; None if it is kept.
        in_after: place after which its copy in may begin; None brings it in, or makes it again, when it is used.
        reason: why, in one sentence.
        price_us: the time that this costs in a cycle.
        bytes: its size.
        op: that made it; empty for a storage that exists at the start.
        module: path of the module.
        line: of the user's code.
    """

    storage: int
    decision: str
    out_after: int | None
    in_after: int | None
    reason: str
    price_us: float
    bytes: int
    op: str
    module: str
    line: str

    def __post_init__(self) -> None:
        self.as_decision()

    def as_decision(self) -> Decision:
        """What the simulator and the core need of it."""
        return Decision(storage=self.storage, decision=self.decision, out_after=self.out_after, in_after=self.in_after)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedOp:
    """An op's name and phase."""

    name: str
    phase: str


@dataclass(frozen=True, kw_only=True)
class PlanTimeline:
    """The predicted cycle, to be drawn. Lists have one element for each place, times begin with the cycle.

    Attributes:
        start_us: of the op, or of the first replay before it.
        end_us: of the op.
        replay_us: spent before the op on making storages again.
        memory_bytes: in use.
        swapped_bytes: on the host.
        dropped_bytes: of dropped storages.
        plain_bytes: in use without the plan.
        copies: over the link.
    """

    start_us: tuple[float, ...] = ()
    end_us: tuple[float, ...] = ()
    replay_us: tuple[float, ...] = ()
    memory_bytes: tuple[int, ...] = ()
    swapped_bytes: tuple[int, ...] = ()
    dropped_bytes: tuple[int, ...] = ()
    plain_bytes: tuple[int, ...] = ()
    copies: tuple[Copy, ...] = ()

    def lengths(self) -> set[int]:
        """How many places the lists have; one number if all is well."""
        values = (
            self.start_us, self.end_us, self.replay_us, self.memory_bytes, self.swapped_bytes, self.dropped_bytes,
            self.plain_bytes,
        )  # fmt: skip
        return {len(one) for one in values}


@dataclass(slots=True)
class Actions:
    """What the core does after one place: ids of the storages to drop, to page out and to begin to bring in."""

    drop: list[int] = field(default_factory=list)
    pageout: list[int] = field(default_factory=list)
    prefetch: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Plan:
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
        ops: by place.
        timeline: predicted.
    """

    signature: str
    device: str
    limit_bytes: int
    predicted: Predicted
    measured: Measured | None = None
    method: str
    methods: tuple[MethodResult, ...]
    decisions: tuple[PlannedStorage, ...]
    ops: tuple[PlannedOp, ...]
    timeline: PlanTimeline

    def __post_init__(self) -> None:
        places = len(self.ops)
        for number, one in enumerate(self.decisions):
            for name, place in (("out_after", one.out_after), ("in_after", one.in_after)):
                if place is not None and not 0 <= place < places:
                    raise PlanError(f"expected a place below {places} at decisions[{number}].{name}, found {place}")
        if self.timeline.lengths() != {places}:
            raise PlanError(f"expected {places} elements in each list of timeline, found {self.timeline.lengths()}")

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

    def unchanged(self) -> frozenset[int]:
        """Storages that nothing writes: where the host has a copy, they leave without another."""
        return frozenset(one.storage for one in self.decisions if one.decision == DROP_UNCHANGED)

    def served(self) -> frozenset[int]:
        """Storages that stay on the host while ops read and write them there."""
        return frozenset(one.storage for one in self.decisions if one.decision == HOST)

    def to_json(self) -> str:
        """The document as JSON text."""
        document = asdict(self)
        return json.dumps({"format": FORMAT, "version": VERSION, **document}) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Reads what `to_json` wrote.

        Raises:
            PlanError: for text that is no plan of this version, naming the field.
        """
        return read_document(text, form=FORMAT, version=VERSION).closed(_read_plan)

    def save(self, path: str | Path) -> None:
        """Writes the document to a file."""
        Path(path).write_text(self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads what `save` wrote."""
        return cls.from_json(Path(path).read_text())

    def table(self, most: int = 20) -> RenderableType:
        """The plan for people, as a rich table.

        Args:
            most: decisions to show, those of the most bytes first.
        """
        from torch_lms.plan.explain import plan_table

        return plan_table(self, most)

    def __str__(self) -> str:
        """What is decided in total, and what it is predicted to cost, as a short table."""
        known = self.predicted
        lines = [
            f"limit {_gib(self.limit_bytes)}, predicted peak {_gib(known.peak_bytes)} of "
            f"{_gib(known.plain_peak_bytes)}, method {self.method}",
            f"step {known.step_us / 1e3:.1f} ms (plain {known.plain_us / 1e3:.1f}, "
            f"bound {known.lower_bound_us / 1e3:.1f}): recompute {known.recompute_us / 1e3:.1f}, "
            f"waits {known.waits_us / 1e3:.1f}, out {_gib(known.out_bytes)}, in {_gib(known.in_bytes)}",
        ]
        if self.measured is not None:
            found = self.measured
            lines.append(f"measured: {found.step_us / 1e3:.1f} ms, peak {_gib(found.peak_bytes)}")
        lines.append(f"{'decision':<16}{'storages':>10}{'GiB':>10}{'price (ms)':>12}")
        for kind in DECISIONS:
            mine = [one for one in self.decisions if one.decision == kind]
            if mine:
                size, price = sum(one.bytes for one in mine), sum(one.price_us for one in mine)
                lines.append(f"{kind:<16}{len(mine):>10}{size / _GIB:>10.2f}{price / 1e3:>12.2f}")
        return "\n".join(lines)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / _GIB:.2f} GiB"


def _read_plan(fields: Fields) -> Plan:
    return Plan(
        signature=fields.text("signature"),
        device=fields.text("device"),
        limit_bytes=fields.integer("limit_bytes"),
        predicted=fields.object("predicted", _read_predicted),
        measured=fields.optional_object("measured", _read_measured),
        method=fields.text("method"),
        methods=fields.objects("methods", _read_method),
        decisions=fields.objects("decisions", _read_decision),
        ops=fields.objects("ops", _read_op),
        timeline=fields.object("timeline", _read_timeline),
    )


def _read_predicted(fields: Fields) -> Predicted:
    return Predicted(
        plain_us=fields.number("plain_us"),
        step_us=fields.number("step_us"),
        lower_bound_us=fields.number("lower_bound_us"),
        peak_bytes=fields.integer("peak_bytes"),
        plain_peak_bytes=fields.integer("plain_peak_bytes"),
        out_bytes=fields.integer("out_bytes"),
        in_bytes=fields.integer("in_bytes"),
        recompute_us=fields.number("recompute_us"),
        waits_us=fields.number("waits_us"),
        host_peak_bytes=fields.integer("host_peak_bytes"),
    )


def _read_measured(fields: Fields) -> Measured:
    return Measured(step_us=fields.number("step_us"), peak_bytes=fields.integer("peak_bytes"))


def _read_method(fields: Fields) -> MethodResult:
    return MethodResult(name=fields.text("name"), step_us=fields.optional_number("step_us"), note=fields.text("note"))


def _read_decision(fields: Fields) -> PlannedStorage:
    return PlannedStorage(
        storage=fields.integer("storage"),
        decision=fields.text("decision", among=DECISIONS),
        out_after=fields.optional_integer("out_after"),
        in_after=fields.optional_integer("in_after"),
        reason=fields.text("reason"),
        price_us=fields.number("price_us"),
        bytes=fields.integer("bytes"),
        op=fields.text("op"),
        module=fields.text("module"),
        line=fields.text("line"),
    )


def _read_op(fields: Fields) -> PlannedOp:
    return PlannedOp(name=fields.text("name"), phase=fields.text("phase"))


def _read_copy(fields: Fields) -> Copy:
    return Copy(
        storage=fields.integer("storage"),
        direction=fields.text("direction", among=(OUT, IN)),
        start_us=fields.number("start_us", least=-1e18),
        end_us=fields.number("end_us", least=-1e18),
    )


def _read_timeline(fields: Fields) -> PlanTimeline:
    return PlanTimeline(
        start_us=fields.numbers("start_us"),
        end_us=fields.numbers("end_us"),
        replay_us=fields.numbers("replay_us"),
        memory_bytes=fields.integers("memory_bytes"),
        swapped_bytes=fields.integers("swapped_bytes"),
        dropped_bytes=fields.integers("dropped_bytes"),
        plain_bytes=fields.integers("plain_bytes"),
        copies=fields.objects("copies", _read_copy),
    )
