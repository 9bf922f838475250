"""The planner as a process: a request as JSON comes in, a plan as JSON goes out."""

from __future__ import annotations

import json
import sys
from typing import Any

from torch_lms.errors import LimitError, LmsError
from torch_lms.plan.planner import make_plan
from torch_lms.plan.trace import Trace

__all__ = ["main"]

_WORTH_A_CHANGE = 0.002  # of a step


def main() -> int:
    """Reads a request with the arguments of `make_plan`, and writes plans, a line each. Returns the exit status.

    The first comes soon; another follows if it is better. The request has ``margin_bytes``, too: the plans stay so far
    below the limit if one can.
    """
    request = json.load(sys.stdin)
    limit_bytes, margin_bytes = request.pop("limit_bytes"), request.pop("margin_bytes")
    try:
        trace = Trace.from_json(json.dumps(request.pop("trace")))
        _answer(trace, limit_bytes, margin_bytes, request)
    except LmsError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


def _answer(trace: Trace, limit_bytes: int, margin_bytes: int, request: dict[str, Any]) -> None:
    soon = None
    try:
        soon = make_plan(trace, limit_bytes - margin_bytes, **request, simply=True)
        print(soon.to_json(), end="", flush=True)
        best = make_plan(trace, limit_bytes - margin_bytes, **request)
    except LimitError:
        best = make_plan(trace, limit_bytes, **request)
    if soon is None or best.predicted.step_us < soon.predicted.step_us * (1 - _WORTH_A_CHANGE):
        print(best.to_json(), end="")


if __name__ == "__main__":
    sys.exit(main())
