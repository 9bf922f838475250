"""The planner as a process: a request comes in, plans go out. See Note [What the program does for a plan]."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Mapping
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

    A ``document`` says more of one of the plans: ``of`` is its number among the one that has been followed, if there is
    one, and those that were answered, in turn. In the end there is one for each, with its bound.

    Args:
        given: either a ``recording`` and the ``link`` that it was made beside, or a ``trace``, the ``times_us`` of a
            cycle that followed a plan, what its ``host`` took (see `timed_again`; None if that is not known), and that
            plan as ``followed``, whose cycles take ``step_us``, and wait for memory for ``wait_us`` of it (left out if
            nobody knows); documents as JSON in bytes. Besides, the other arguments of a `Request`.
    """
    rest = dict(given)
    trace = likely = _trace_of(rest)
    yield {"trace": trace.to_json().encode()}
    told: list[Plan] = []
    lost = 0.0
    if (given_plan := rest.pop("followed", None)) is not None:
        followed = Plan.from_json(given_plan.decode())
        step_us, wait_us = rest.pop("step_us", 0.0), rest.pop("wait_us", 0.0)
        lost = lost_share(followed.predicted.step_us, step_us, wait_us)
        likely = calibrated(trace, followed, step_us)
        told.append(priced_again(followed, likely))
        yield _more(told, 0)
    if (rest.get("host_limit_bytes") or 0) >= simulate(trace, []).peak_bytes:
        rest["host_limit_bytes"] = None  # whatever goes out has room
    rest |= margins(trace, rest["limit_bytes"], lost=lost)
    request = Request(trace=trace, **rest)
    yield from _plans(request, likely, told)
    yield from _bounds(request, told)


def _trace_of(rest: dict[str, Any]) -> Trace:
    """The request's trace; takes out of it what that is made of."""
    recording, link = rest.pop("recording", None), rest.pop("link", None)
    if recording is not None:
        return trace_of(recording, limit_bytes=rest["limit_bytes"], link=Link(**link))
    trace = Trace.from_json(rest.pop("trace").decode())
    times_us, host = rest.pop("times_us", None), rest.pop("host", None)
    return trace if times_us is None else timed_again(trace, times_us, host)


def _plans(request: Request, likely: Trace, told: list[Plan]) -> Iterator[dict[str, Any]]:
    """Plans for the program, which waits for no bound.

    Args:
        request: what to plan.
        likely: its trace with the times by which plans are priced.
        told: what the program knows, to which they are added.
    """
    first = None
    try:
        first = plan_in_pieces(request, simply=True)
        yield _told(request, first, likely, told)
    except LimitError:
        pass  # not so simply, perhaps
    best = plan_in_pieces(request, simply=False)
    if first is None or request.judged_us(best) < request.judged_us(first) * (1 - _WORTH_A_CHANGE):
        yield _told(request, best, likely, told)
    told[-1] = replace(told[-1], methods=best.methods)


def _told(request: Request, plan: Plan, likely: Trace, told: list[Plan]) -> dict[str, Any]:
    told.append(plan if likely is request.trace else priced_again(plan, likely))
    return {"plan": told_of(told[-1]), "compiled": compile_plan(plan)}


def _bounds(request: Request, told: list[Plan]) -> Iterator[dict[str, Any]]:
    """The last plan first: it is the one that is looked at, if it stays."""
    for number in reversed(range(len(told))):
        plan, last = told[number], told[-1]
        if plan is not last and plan.placeholders == last.placeholders and plan.limit_bytes <= last.limit_bytes:
            bound_us = last.predicted.lower_bound_us  # no plan within less memory is faster
        else:
            bound_us = bounded(request, plan).predicted.lower_bound_us
        bound_us = min(max(bound_us, plan.predicted.plain_us), plan.predicted.step_us)
        told[number] = replace(plan, predicted=replace(plan.predicted, lower_bound_us=bound_us))
        yield _more(told, number)


def _more(told: list[Plan], number: int) -> dict[str, Any]:
    return {"document": told_of(told[number]), "of": number}


if __name__ == "__main__":
    sys.exit(main())
