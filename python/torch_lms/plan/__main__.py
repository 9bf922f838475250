"""The planner as a process: a request comes in, plans go out. See Note [What the program does for a plan]."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch_lms.errors import LimitError, LmsError
from torch_lms.plan.calibration import calibrated
from torch_lms.plan.document import Plan
from torch_lms.plan.margins import lost_share, margins
from torch_lms.plan.messages import read_message, write_message
from torch_lms.plan.pieces import Request, bounded, plan_in_pieces
from torch_lms.plan.predict import priced_again
from torch_lms.plan.recording import compile_plan, timed_again, told_of, trace_of
from torch_lms.plan.simulator import simulate
from torch_lms.plan.trace import Link, Trace

__all__ = ["answers", "main"]

_WORTH_A_CHANGE = 0.002  # of a step


def main() -> int:
    """Reads a request, and writes the answers to it. Returns the exit status."""
    gc.disable()  # it would go through all that is planned, again and again, and there are hardly any cycles
    given = read_message(sys.stdin.buffer)
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # whatever a solver prints is no answer
        try:
            for answer in answers(given or {}):
                write_message(out, answer)
        except LmsError as error:
            print(" ".join(str(error).split()), file=sys.stderr)
            return 1
    return 0


def answers(given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What is answered to a request: the trace, and plans. The first comes soon; another follows if it is better.

    A document that is ``priced`` says more of the plan before it, or of the one that has been followed. Of the latter,
    ``bounded`` comes last.

    Args:
        given: either a ``recording`` and the ``link`` that it was made beside, or a ``trace``, the ``times_us`` of a
            cycle that followed a plan, what its ``host`` took (see `timed_again`; None if that is not known), and that
            plan as ``followed``, whose cycles take ``step_us``, and wait for memory for ``wait_us`` of it (left out if
            nobody knows); documents as JSON in bytes. Besides, the other arguments of a `Request`.
    """
    rest = dict(given)
    trace = likely = _trace_of(rest)
    yield {"trace": trace.to_json().encode()}
    followed: Plan | None = None
    lost = 0.0
    if (given_plan := rest.pop("followed", None)) is not None:
        followed = Plan.from_json(given_plan.decode())
        step_us, wait_us = rest.pop("step_us", 0.0), rest.pop("wait_us", 0.0)
        lost = lost_share(followed.predicted.step_us, step_us, wait_us)
        likely = calibrated(trace, followed, step_us)
        followed = priced_again(followed, likely)
        yield {"priced": told_of(followed)}
    if (rest.get("host_limit_bytes") or 0) >= simulate(trace, []).peak_bytes:
        rest["host_limit_bytes"] = None  # whatever goes out has room
    rest |= margins(trace, rest["limit_bytes"], lost=lost)
    request = Request(trace=trace, **rest)
    last = yield from _plans(request, likely)
    if followed is not None:
        if followed.placeholders == last.placeholders and followed.limit_bytes <= last.limit_bytes:
            bound_us = min(last.predicted.lower_bound_us, followed.predicted.step_us)  # no plan within less is faster
            followed = replace(followed, predicted=replace(followed.predicted, lower_bound_us=bound_us))
        else:
            followed = bounded(request, followed)
        yield {"bounded": told_of(followed)}


def _trace_of(rest: dict[str, Any]) -> Trace:
    """The request's trace; takes out of it what that is made of."""
    recording, link = rest.pop("recording", None), rest.pop("link", None)
    if recording is not None:
        return trace_of(recording, limit_bytes=rest["limit_bytes"], link=Link(**link))
    trace = Trace.from_json(rest.pop("trace").decode())
    times_us, host = rest.pop("times_us", None), rest.pop("host", None)
    return trace if times_us is None else timed_again(trace, times_us, host)


def _plans(request: Request, likely: Trace) -> Generator[dict[str, Any], None, Plan]:
    """Plans, and in the end the last of them with the linear program's bound, for which the program has not waited.

    Args:
        request: what to plan.
        likely: its trace with the times by which the last plan is priced.
    """
    last = None
    try:
        last = plan_in_pieces(request, simply=True)
        yield _told(last)
    except LimitError:
        pass  # not so simply, perhaps
    best = plan_in_pieces(request, simply=False)
    if last is None or request.judged_us(best) < request.judged_us(last) * (1 - _WORTH_A_CHANGE):
        last = best
        yield _told(best)
    last = bounded(request, replace(last, methods=best.methods))
    last = priced_again(last, likely)
    yield {"priced": told_of(last)}
    return last


def _told(plan: Plan) -> dict[str, Any]:
    return {"plan": told_of(plan), "compiled": compile_plan(plan)}


if __name__ == "__main__":
    sys.exit(main())
