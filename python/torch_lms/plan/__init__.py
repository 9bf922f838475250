"""What happens to every storage of a program under a memory limit: from a trace to a plan. Imports no torch."""

from __future__ import annotations

from torch_lms.plan.decision import DROP_UNCHANGED, HOST, KEEP, RECOMPUTE, SWAP, Decision
from torch_lms.plan.document import Measured, Plan
from torch_lms.plan.least import least_limit
from torch_lms.plan.planner import make_plan
from torch_lms.plan.simulator import simulate
from torch_lms.plan.timeline import Timeline
from torch_lms.plan.trace import Host, Link, Recipe, Trace, TraceOp, TraceStorage

__all__ = [
    "DROP_UNCHANGED",
    "HOST",
    "KEEP",
    "RECOMPUTE",
    "SWAP",
    "Decision",
    "Host",
    "Link",
    "Measured",
    "Plan",
    "Recipe",
    "Timeline",
    "Trace",
    "TraceOp",
    "TraceStorage",
    "least_limit",
    "make_plan",
    "simulate",
]
