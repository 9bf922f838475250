"""The planner as a process: a request as JSON comes in, a plan as JSON goes out."""

from __future__ import annotations

import json
import sys

from torch_lms.errors import LimitError, LmsError
from torch_lms.plan.planner import make_plan
from torch_lms.plan.trace import Trace

__all__ = ["main"]


def main() -> int:
    """Reads a request with the arguments of `make_plan`, and writes its plan. Returns the exit status.

    The request has ``margin_bytes``, too: the plan stays so far below the limit if one can.
    """
    request = json.load(sys.stdin)
    limit_bytes, margin_bytes = request.pop("limit_bytes"), request.pop("margin_bytes")
    try:
        trace = Trace.from_json(json.dumps(request.pop("trace")))
        try:
            plan = make_plan(trace, limit_bytes - margin_bytes, **request)
        except LimitError:
            plan = make_plan(trace, limit_bytes, **request)
    except LmsError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    sys.stdout.write(plan.to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
