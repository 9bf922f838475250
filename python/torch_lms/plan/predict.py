"""What a plan says of its cycle: how long it takes, how much memory, and when.

Note [Copies out in a plan's peak]: the host is ahead of the device, and memory that a copy out still reads is in use
when it asks for more. A program that follows a plan waits for such copies, so that they and what the plan keeps are
within the peak that it predicts (see `Plan.room_bytes`). That peak is what the plan needs without them, where waiting
for them takes next to no time; it is up to the plan's limit where it does.

Note [A host's speed]: a host is slower at times, beside other work or on a machine that is shared, and its times are
those of one cycle. Plans that take as long may differ when it is slower. So they are compared by the mean of what they
take on the host as it was timed and on a slower one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch_lms.plan.decision import KEEP, Decision
from torch_lms.plan.document import Plan, PlanTimeline, Predicted
from torch_lms.plan.placeholders import with_placeholders
from torch_lms.plan.simulator import simulate
from torch_lms.plan.timeline import Timeline
from torch_lms.plan.trace import Trace

__all__ = ["drawn", "judged_us", "predicted_of", "priced_again", "timed_within"]

_PRICE_OF_WAITING = 1.001  # of a step


def judged_us(trace: Trace, decisions: Iterable[Decision], limit_bytes: int, step_us: float) -> float:
    """By which plans are compared, see Note [A host's speed].

    Args:
        trace: with the plan's placeholders.
        decisions: the plan's.
        limit_bytes: likewise.
        step_us: that the cycle takes by simulation, on the host as it was timed.
    """
    if not trace.host.op_us:
        return step_us
    return (step_us + simulate(trace.on_slower_host, decisions, limit_bytes).step_us) / 2


def timed_within(trace: Trace, leaving: Iterable[Decision], limit_bytes: int) -> Timeline:
    """The cycle within the least memory in which it takes no longer than within the limit.

    Args:
        trace: with the plan's placeholders.
        leaving: what the plan decides.
        limit_bytes: the plan's.
    """
    given = list(leaving)
    found = simulate(trace, given, limit_bytes)
    if not found.feasible:
        return found
    least = simulate(trace, given, max(found.planned_bytes))
    return least if least.step_us <= found.step_us * _PRICE_OF_WAITING else found


def priced_again(plan: Plan, trace: Trace) -> Plan:
    """The plan as it is, with what it says of its cycle in other times.

    Args:
        plan: of the same cycle.
        trace: with the times of a step that followed it.
    """
    leaving = [one for one in plan.decisions if one.decision != KEEP]
    plain = simulate(trace, [])
    found = timed_within(with_placeholders(trace, plan.placeholders), leaving, plan.limit_bytes)
    bound_us = max(plan.predicted.lower_bound_us, plain.step_us) if plan.ops == trace.ops else plain.step_us
    ops = tuple(replace(op, duration_us=timed.duration_us) for op, timed in zip(plan.ops, trace.ops, strict=True))
    return replace(plan, predicted=predicted_of(found, plain, bound_us), timeline=drawn(found, plain), ops=ops)


def predicted_of(found: Timeline, plain: Timeline, bound_us: float) -> Predicted:
    """What a plan says of its cycle.

    Args:
        found: the cycle with the plan.
        plain: without one.
        bound_us: no plan is faster.
    """
    return Predicted(
        plain_us=plain.step_us,
        step_us=found.step_us,
        lower_bound_us=min(bound_us, found.step_us),
        peak_bytes=found.peak_bytes,
        plain_peak_bytes=plain.peak_bytes,
        out_bytes=found.out_bytes,
        in_bytes=found.in_bytes,
        recompute_us=found.recompute_us,
        waits_us=found.waits_us,
        host_peak_bytes=found.host_peak_bytes,
    )


def drawn(found: Timeline, plain: Timeline) -> PlanTimeline:
    """The same as curves and bars."""
    return PlanTimeline(
        start_us=tuple(found.start_us),
        end_us=tuple(found.end_us),
        replay_us=tuple(found.replay_us),
        memory_bytes=tuple(found.memory_bytes),
        leaving_bytes=tuple(
            used - planned for used, planned in zip(found.memory_bytes, found.planned_bytes, strict=True)
        ),
        swapped_bytes=tuple(found.swapped_bytes),
        dropped_bytes=tuple(found.dropped_bytes),
        plain_bytes=tuple(plain.memory_bytes),
        copies=tuple(found.copies),
    )
