"""``python -m torch_lms explain``: plans are shown and drawn."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console

from torch_lms.cli.given_model import check_folders, check_picture
from torch_lms.cli.lines import print_line
from torch_lms.cli.plan import add_wishes, plan_under
from torch_lms.errors import PlanError
from torch_lms.memory_sizes import parse_bytes
from torch_lms.plan import Plan, Trace
from torch_lms.plan.explain import draw_plan, plan_table
from torch_lms.plan.fields import read_text

__all__ = ["add_explain", "run_explain"]


def add_explain(parser: argparse.ArgumentParser) -> None:
    """Gives a parser the words of ``explain``."""
    parser.add_argument("file", type=Path, help="a plan's JSON file, or with --limit a trace's")
    parser.add_argument("--limit", help="plan the trace under this limit first, such as 20GiB")
    add_wishes(parser)
    parser.add_argument("--output", type=Path, help="draw the plan: a .svg, .png or .pdf file")
    parser.add_argument("--most", type=int, default=20, help="storages to list (%(default)s)")


def run_explain(given: argparse.Namespace, console: Console) -> int:
    """Shows a plan and draws it.

    Raises:
        LmsError: for a file that is no plan, or a trace without a limit.
    """
    check_folders(given.output)
    check_picture(given.output)
    if given.most < 0:
        raise ValueError(f"expected a number of storages for --most, found {given.most}; take 0 for none")
    text = read_text(given.file)
    if _is_trace(text):
        if given.limit is None:
            raise PlanError(f"expected a plan, or a trace and --limit, found the trace {given.file}; add --limit")
        plan = plan_under(Trace.from_json(text), parse_bytes(given.limit), given)
    elif given.limit is not None or given.host_limit is not None or given.no_swap or given.no_recompute:
        raise PlanError(
            "expected a trace beside --limit, --host-limit, --no-swap and --no-recompute, found the plan "
            f"{given.file}; leave them out"
        )
    else:
        plan = Plan.from_json(text)
    if given.output:
        draw_plan(plan, given.output)  # first: who reads the table may stop to
    console.print(plan_table(plan, given.most))
    if given.output:
        print_line(console, f"wrote {given.output}")
    return 0


def _is_trace(text: str) -> bool:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and document.get("format") == Trace.FORMAT
