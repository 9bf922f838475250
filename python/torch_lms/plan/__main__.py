"""The planner as a process: a request as JSON comes in, a plan as JSON goes out."""

from __future__ import annotations

import json
import sys

from torch_lms.errors import LmsError
from torch_lms.plan.planner import make_plan
from torch_lms.plan.trace import Trace

__all__ = ["main"]


def main() -> int:
    """Reads a request with the arguments of `make_plan`, and writes its plan. Returns the exit status."""
    request = json.load(sys.stdin)
    try:
        trace = Trace.from_json(json.dumps(request.pop("trace")))
        plan = make_plan(trace, **request)
    except LmsError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    sys.stdout.write(plan.to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
