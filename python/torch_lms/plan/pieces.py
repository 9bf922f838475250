"""Plans for memory that lies in pieces: what one large storage needs has to be free in one piece.

Note [Larger than what comes and goes]: free memory has pieces as large as what comes and goes in a cycle: what its ops
make, and weights of which there are many. A weight that is larger, as an inference's embedding, would rarely find one
to come back to. So it stays, and less memory has to be free, unless that takes longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch_lms.errors import LimitError
from torch_lms.plan.decision import HOST
from torch_lms.plan.document import Plan
from torch_lms.plan.placeholders import Placeholder, find_placeholders, with_placeholders
from torch_lms.plan.planner import Planner
from torch_lms.plan.trace import Trace

__all__ = ["Request", "bounded", "plan_in_pieces"]

_MOST_PRICE = 1.04  # of a step without placeholders, without a margin, or while the largest storages leave
_TOO_LARGE = "it is larger than all that comes and goes, and would find no free block to come back to"
_FEW = 8  # storages of a size


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to plan, with the arguments of `make_plan`.

    Attributes:
        trace: of the program.
        limit_bytes: of the device's memory.
        margin_bytes: by which the plan stays below the limit, if one can.
        pieces_bytes: by which it stays further below where free memory may lie in pieces; half of it with placeholders.
        host_limit_bytes: of the host's memory.
        swap: whether storages may leave by a copy.
        recompute: whether they may be dropped and made again.
    """

    trace: Trace
    limit_bytes: int
    margin_bytes: int = 0
    pieces_bytes: int = 0
    host_limit_bytes: int | None = None
    swap: bool = True
    recompute: bool = True

    planners: dict[tuple[int, tuple[Placeholder, ...]], Planner] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def keeping_the_largest(self) -> Request | None:
        """The same where the few storages stay that are larger than all that comes and goes; None without one."""
        sizes = sorted((one.bytes for one in self.trace.storages if one.movable and one.producer is None), reverse=True)
        if not self.pieces_bytes or not sizes:
            return None
        made_bytes = max((one.bytes for one in self.trace.storages if one.producer is not None), default=0)
        usual_bytes = max(made_bytes, sizes[min(_FEW, len(sizes) - 1)])
        if sizes[0] <= usual_bytes:
            return None
        storages = tuple(
            replace(one, movable=False, why_not_movable=_TOO_LARGE) if one.movable and one.bytes > usual_bytes else one
            for one in self.trace.storages
        )
        pieces_bytes = max(usual_bytes, self.pieces_bytes - (sizes[0] - usual_bytes))
        return replace(self, trace=replace(self.trace, storages=storages), pieces_bytes=pieces_bytes)

    def planner(self, limit_bytes: int, placeholders: Sequence[Placeholder] = ()) -> Planner:
        """The one that plans for so much memory while these are held."""
        key = limit_bytes, tuple(placeholders)
        if key not in self.planners:
            self.planners[key] = Planner(
                with_placeholders(self.trace, placeholders),
                limit_bytes,
                host_limit_bytes=self.host_limit_bytes,
                swap=self.swap,
                recompute=self.recompute,
            )
        return self.planners[key]

    @property
    def most_bytes(self) -> int:
        """What plans may use that keep their margin."""
        return self.limit_bytes - self.margin_bytes

    @cached_property
    def free_bytes(self) -> int:
        """What they leave free of that: what pieces ask for; where no plan does, half of the most that one can."""
        planner = self.planner(self.most_bytes - self.pieces_bytes)
        try:
            planner.plan(simply=True)
        except LimitError:
            return min(self.pieces_bytes, max(0, self.most_bytes - planner.least_bytes) // 2)
        return self.pieces_bytes

    def judged_us(self, plan: Plan) -> float:
        """What plans of `plan_in_pieces` are compared by. One without a margin will wait for memory now and then."""
        judged_us = self.planner(plan.limit_bytes, plan.placeholders).judged_us(plan)
        return judged_us if plan.limit_bytes <= self.most_bytes else judged_us * _MOST_PRICE


def plan_in_pieces(request: Request, *, simply: bool) -> Plan:
    """The best plan for the pieces that memory lies in. It has no bound yet: see `bounded`.

    Args:
        request: what to plan; it remembers what was found.
        simply: see `make_plan`; the largest storages then stay if they can, whatever that costs.

    Raises:
        LimitError: if no plan keeps the limit.
    """
    kept = _keeping_the_largest(request, simply=simply)
    if kept is not None and simply:
        return kept  # to find out whether it is worth it takes as long again
    found = _with_placeholders(request, simply=simply)
    return kept if kept is not None and _is_worth_it(kept, found) else found


def _keeping_the_largest(request: Request, *, simply: bool) -> Plan | None:
    try:
        kept = request.keeping_the_largest
        return None if kept is None else _with_placeholders(kept, simply=simply)
    except LimitError:
        return None


def _with_placeholders(request: Request, *, simply: bool) -> Plan:
    """The plan with the most placeholders that are worth their price."""
    try:
        first = _first(request, simply=simply)
    except LimitError:
        return request.planner(request.limit_bytes).plan(simply=simply)
    if all(one.out_after is None for one in first.decisions):
        return first
    placeholders = find_placeholders(
        request.trace, first.decisions, first.timeline.memory_bytes, request.limit_bytes, first.limit_bytes
    )
    while placeholders:
        held = _plan_that_holds(request, placeholders, first, simply=simply)
        if held is not None and _is_worth_it(held, first):
            return held
        placeholders = placeholders[: len(placeholders) // 2]
    return first


def _first(request: Request, *, simply: bool) -> Plan:
    """With room for memory that lies in pieces, unless ops then read more from the host, which is slow."""
    first = request.planner(request.most_bytes - request.free_bytes).plan(simply=simply)
    if not request.pieces_bytes or not _served(first):
        return first
    nearer = request.planner(request.most_bytes).plan(simply=simply)
    return nearer if _served(nearer) < _served(first) else first


def _served(plan: Plan) -> int:
    return sum(one.decision == HOST for one in plan.decisions)


def bounded(request: Request, plan: Plan) -> Plan:
    """A plan of the request's trace with the linear program's bound, which takes time to find."""
    return request.planner(plan.limit_bytes, plan.placeholders).bounded(plan)


def _is_worth_it(held: Plan, first: Plan) -> bool:
    return _served(held) <= _served(first) and held.predicted.step_us <= first.predicted.step_us * _MOST_PRICE


def _plan_that_holds(request: Request, placeholders: list[Placeholder], first: Plan, *, simply: bool) -> Plan | None:
    """By the method that the first is made by, which it is compared with.

    Its memory in use has what is held; what it says of the program without a plan is the first's.
    """
    limit_bytes = request.most_bytes - request.free_bytes // 2
    try:
        plan = request.planner(limit_bytes, placeholders).plan(simply=simply, only=first.method)
    except LimitError:
        return None
    plain, results = first.predicted, {one.name: one for one in plan.methods}
    return replace(
        plan,
        placeholders=tuple(placeholders),
        methods=tuple(results.get(one.name, one) for one in first.methods),
        ops=first.ops,
        predicted=replace(plan.predicted, plain_peak_bytes=plain.plain_peak_bytes),
        timeline=replace(plan.timeline, plain_bytes=first.timeline.plain_bytes),
    )
