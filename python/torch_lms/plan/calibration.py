"""The times of a trace, corrected by what whole cycles have taken.

Note [Timing takes time]: what times ops takes time itself, beside small ones more than they do; and a host that is
shared is not as fast in each cycle. What a plan's cycles have taken that nobody timed is known as a whole. So the times
of ops are made shorter, or the host's longer, until the simulator says the same of that plan. Where all ops together do
not make up for it, as where weights are streamed, the link is faster than it was measured, too. Where it would take too
much, something else is the cause, and they stay. Plans are priced by such times, not made by them: what they are made
by has to be right for each op, not for all of them together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch_lms.plan.decision import KEEP
from torch_lms.plan.document import Plan
from torch_lms.plan.placeholders import with_placeholders
from torch_lms.plan.simulator import simulate
from torch_lms.plan.trace import Trace

__all__ = ["calibrated"]

_CLOSE = 0.005  # of a step
_SHORTEST, _LONGEST = 0.75, 1.33  # times what was timed
_TRIES = 5


def calibrated(trace: Trace, plan: Plan, step_us: float) -> Trace:
    """The trace with times by which the plan's cycle takes as long as it has; see Note [Timing takes time].

    Args:
        trace: with the times of a cycle that followed the plan.
        plan: of the same cycle.
        step_us: that cycles take which follow it; 0 if that is not known.
    """
    timed_us = _step_us(trace, plan)
    if step_us <= 0 or abs(timed_us - step_us) <= _CLOSE * step_us:
        return trace
    if timed_us > step_us:
        found = _found(trace, plan, step_us, _ops_scaled, _SHORTEST)
        return _found(trace, plan, step_us, _all_scaled, _SHORTEST) if found is trace else found
    return _found(trace, plan, step_us, _host_scaled, _LONGEST) if trace.host.op_us else trace


def _found(trace: Trace, plan: Plan, step_us: float, scale: Callable[[Trace, float], Trace], furthest: float) -> Trace:
    """Halves the range of factors between 1 and the furthest, if that is far enough."""
    furthest_us = _step_us(scale(trace, furthest), plan)
    if furthest_us > step_us if furthest < 1 else furthest_us < step_us:
        return trace
    low, high = sorted((furthest, 1.0))
    for _ in range(_TRIES):
        middle = (low + high) / 2
        low, high = (middle, high) if _step_us(scale(trace, middle), plan) < step_us else (low, middle)
    return scale(trace, (low + high) / 2)


def _step_us(trace: Trace, plan: Plan) -> float:
    leaving = [one for one in plan.decisions if one.decision != KEEP]
    return simulate(with_placeholders(trace, plan.placeholders), leaving, plan.limit_bytes).step_us


def _host_scaled(trace: Trace, times: float) -> Trace:
    return replace(trace, host=trace.host.slower(times))


def _all_scaled(trace: Trace, times: float) -> Trace:
    return replace(_ops_scaled(trace, times), link=trace.link.slower(times))


def _ops_scaled(trace: Trace, times: float) -> Trace:
    ops = tuple(replace(op, duration_us=times * op.duration_us) for op in trace.ops)
    storages = tuple(
        one
        if one.recompute is None
        else replace(one, recompute=replace(one.recompute, duration_us=times * one.recompute.duration_us))
        for one in trace.storages
    )
    return replace(trace, ops=ops, storages=storages, host=trace.host.slower(times))
