"""Times a plan: one compute stream, one copy direction out and one in, and the limit that makes them wait.

Note [Reserved memory]: what begins to come in after a place is charged from that place on, so its copy begins when all
that is charged there fits. Then no copy in can take the room that an op needs, and memory that fits at every place once
copies out have ended always comes free: waiting ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from torch_lms.plan.decision import DROP_UNCHANGED, HOST, Decision, check_decisions
from torch_lms.plan.residency import PlaceEvents, Residency
from torch_lms.plan.timeline import IN, OUT, Copy, Timeline
from torch_lms.plan.trace import Trace

__all__ = ["simulate"]


def simulate(trace: Trace, decisions: Iterable[Decision], limit_bytes: int | None = None) -> Timeline:
    """One steady cycle of a program that carries out decisions under a limit.

    Args:
        trace: of the program.
        decisions: for the storages that leave; all others are kept.
        limit_bytes: of the memory in use; None lets nothing wait for memory.

    Returns:
        The timeline. Where the decisions need more than the limit it goes on and says so in ``excess_bytes``.

    Raises:
        PlanError: for a decision that its storage does not allow.
    """
    given = list(decisions)
    check_decisions(trace, given)
    clock = _Clock(trace, Residency(trace, given))
    timeline = clock.cycle(None if clock.residency.away else limit_bytes)
    if clock.residency.away:  # the first cycle began with everything on the device
        timeline = clock.cycle(limit_bytes)
    elif limit_bytes is not None and any(one.out_after is not None for one in given):
        pass
    timeline.host_peak_bytes = _host_peak_bytes(trace, given, timeline.swapped_bytes)
    return timeline


def _host_peak_bytes(trace: Trace, decisions: Sequence[Decision], swapped_bytes: Sequence[int]) -> int:
    """What the host holds at most: the copies of unchanged storages stay for the whole cycle, all others come and go."""
    staying = {one.storage for one in decisions if one.decision in (DROP_UNCHANGED, HOST)}
    return max(swapped_bytes, default=0) + sum(trace.storages[storage].bytes for storage in staying)
