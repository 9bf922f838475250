"""The planner as a process: a request as JSON comes in, a plan as JSON goes out."""

from __future__ import annotations

import json
import sys

from torch_lms.errors import LimitError, LmsError
from torch_lms.plan.pieces import Request, plan_in_pieces
from torch_lms.plan.trace import Trace

__all__ = ["main"]

_WORTH_A_CHANGE = 0.002  # of a step


def main() -> int:
    """Reads a request, and writes plans, a line each. Returns the exit status.

    The first comes soon; another follows if it is better.
    """
    given = json.load(sys.stdin)
    try:
        trace = Trace.from_json(json.dumps(given.pop("trace")))
        _answer(Request(trace=trace, **given))
    except LmsError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


def _answer(request: Request) -> None:
    soon = None
    try:
        soon = plan_in_pieces(request, simply=True)
        print(soon.to_json(), end="", flush=True)
    except LimitError:
        pass  # not so simply, perhaps
    best = plan_in_pieces(request, simply=False)
    if soon is None or best.predicted.step_us < soon.predicted.step_us * (1 - _WORTH_A_CHANGE):
        print(best.to_json(), end="")


if __name__ == "__main__":
    sys.exit(main())
