"""``python -m torch_lms plan`` and ``explain``: plans are made from traces, shown and drawn."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console

from torch_lms.errors import PlanError
from torch_lms.plan import Plan, Trace, make_plan
from torch_lms.plan.explain import draw_plan
from torch_lms.plan.fields import read_text
from torch_lms.swap import parse_bytes

__all__ = ["add_explain", "add_plan", "run_explain", "run_plan"]


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Gives a parser the words of ``plan``."""
    parser.add_argument("trace", type=Path, help="a trace's JSON file")
    parser.add_argument("--limit", required=True, help="of the device's memory, such as 20GiB")
    _add_wishes(parser)
    parser.add_argument("--output", type=Path, help="write the plan, as JSON, to this file")


def add_explain(parser: argparse.ArgumentParser) -> None:
    """Gives a parser the words of ``explain``."""
    parser.add_argument("file", type=Path, help="a plan's JSON file, or with --limit a trace's")
    parser.add_argument("--limit", help="plan the trace under this limit first, such as 20GiB")
    _add_wishes(parser)
    parser.add_argument("--output", type=Path, help="draw the plan: a .svg, .png or .pdf file")
    parser.add_argument("--most", type=int, default=20, help="storages to list (%(default)s)")


def run_plan(given: argparse.Namespace, console: Console) -> int:
    """Plans a trace, shows the plan and writes it.

    Raises:
        LmsError: for a file that is no trace, a limit that makes no sense, or one that nothing meets.
    """
    plan = _planned(Trace.load(given.trace), given)
    console.print(str(plan), markup=False, highlight=False, soft_wrap=True)
    if given.output:
        plan.save(given.output)
        console.print(f"wrote {given.output}", markup=False, highlight=False, soft_wrap=True)
    return 0


def run_explain(given: argparse.Namespace, console: Console) -> int:
    """Shows a plan and draws it.

    Raises:
        LmsError: for a file that is no plan, or a trace without a limit.
    """
    text = read_text(given.file)
    if _is_trace(text):
        if given.limit is None:
            raise PlanError(f"expected a plan, or a trace and --limit, found the trace {given.file}; add --limit")
        plan = _planned(Trace.from_json(text), given)
    else:
        plan = Plan.from_json(text)
    console.print(plan.table(given.most))
    if given.output:
        draw_plan(plan, given.output)
        console.print(f"wrote {given.output}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _add_wishes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host-limit", help="of the host's memory for swapped storages")
    parser.add_argument("--no-swap", action="store_true", help="let no storage leave by a copy")
    parser.add_argument("--no-recompute", action="store_true", help="drop no storage")


def _planned(trace: Trace, given: argparse.Namespace) -> Plan:
    return make_plan(
        trace,
        parse_bytes(given.limit),
        host_limit_bytes=None if given.host_limit is None else parse_bytes(given.host_limit),
        swap=not given.no_swap,
        recompute=not given.no_recompute,
    )


def _is_trace(text: str) -> bool:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and document.get("format") == Trace.FORMAT
