"""Plans for memory that lies in pieces: what one large storage needs has to be free in one piece."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch_lms.errors import LimitError
from torch_lms.plan.decision import HOST
from torch_lms.plan.document import Plan
from torch_lms.plan.placeholders import Placeholder, find_placeholders, with_placeholders
from torch_lms.plan.planner import make_plan
from torch_lms.plan.trace import Trace

__all__ = ["Request", "plan_in_pieces"]

_MOST_PRICE = 1.04  # of a step without placeholders


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

    def plan(self, margin_bytes: int, *, simply: bool, trace: Trace | None = None) -> Plan:
        """A plan so far below the limit."""
        return make_plan(
            trace or self.trace,
            self.limit_bytes - margin_bytes,
            host_limit_bytes=self.host_limit_bytes,
            swap=self.swap,
            recompute=self.recompute,
            simply=simply,
        )


def plan_in_pieces(request: Request, *, simply: bool) -> Plan:
    """The plan with the most placeholders that are worth their price.

    Args:
        request: what to plan.
        simply: see `make_plan`.

    Raises:
        LimitError: if no plan keeps the limit.
    """
    try:
        first = request.plan(request.margin_bytes + request.pieces_bytes, simply=simply)
    except LimitError:
        return request.plan(0, simply=simply)
    if all(one.out_after is None for one in first.decisions):
        return first
    placeholders = find_placeholders(request.trace, first.decisions, first.timeline.memory_bytes, request.limit_bytes)
    while placeholders:
        held = _plan_that_holds(request, placeholders, first, simply=simply)
        if held is not None and _is_worth_it(held, first):
            return held
        placeholders = placeholders[: len(placeholders) // 2]
    return first


def _is_worth_it(held: Plan, first: Plan) -> bool:
    served, served_first = (sum(one.decision == HOST for one in plan.decisions) for plan in (held, first))
    return served <= served_first and held.predicted.step_us <= first.predicted.step_us * _MOST_PRICE


def _plan_that_holds(request: Request, placeholders: list[Placeholder], first: Plan, *, simply: bool) -> Plan | None:
    """Its memory in use has what is held; what it says of the program without a plan is the first's."""
    trace = with_placeholders(request.trace, placeholders)
    try:
        plan = request.plan(request.margin_bytes + request.pieces_bytes // 2, simply=simply, trace=trace)
    except LimitError:
        return None
    plain = first.predicted
    return replace(
        plan,
        placeholders=tuple(placeholders),
        ops=first.ops,
        predicted=replace(plan.predicted, plain_peak_bytes=plain.plain_peak_bytes),
        timeline=replace(plan.timeline, plain_bytes=first.timeline.plain_bytes),
    )
