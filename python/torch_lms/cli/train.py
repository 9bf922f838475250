"""The demo: trains without a limit and under one, and shows that only memory and time differ."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import torch_lms
from torch_lms.cli.checks import Check, check_runs
from torch_lms.cli.given_model import check_folders, check_picture
from torch_lms.cli.lines import print_line
from torch_lms.cli.report import RunProgress, check_table, comparison_table, step_table
from torch_lms.cli.run import Paging, RunResult, run_in_fresh_process
from torch_lms.cli.timeline import draw_timelines
from torch_lms.cli.workload import Workload
from torch_lms.memory_sizes import GIB, parse_bytes
from torch_lms.plan import Plan
from torch_lms.plan.explain import draw_plan
from torch_lms.swap.limits import parse_limits

__all__ = ["TrainOptions", "train"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    """What ``python -m torch_lms train`` does.

    Attributes:
        workload: what is trained.
        limit: of the limited run's tensor bytes: a size, or a percentage of the plain run's measured peak.
        paging: how paging is set up, but for the limit.
        output: the picture that is drawn; None draws none. That of the plan, if there is one, is drawn beside it.
        json: the file that gets all figures; None writes none.
        anonymous_percent: see `check_runs`.

    Raises:
        LimitError: for a limit that cannot be understood, or a device that is not there.
        ValueError: for a picture of an unknown kind, a folder that is not there, or a share that is none.
    """

    workload: Workload
    limit: str
    paging: Paging
    output: Path | None = None
    json: Path | None = None
    anonymous_percent: float | None = None

    def __post_init__(self) -> None:
        parse_bytes(self.limit, total_bytes=GIB)
        parse_limits({self.workload.device: GIB})
        check_picture(self.output)
        check_folders(self.output, self.json)
        if self.anonymous_percent is not None and not self.anonymous_percent > 0:
            raise ValueError(
                f"expected a share above 0 for --anonymous-percent, found {self.anonymous_percent}; "
                "100 is all of the plain run's"
            )


def train(options: TrainOptions, console: Console) -> int:
    """Runs plain and limited, compares, and reports.

    Returns:
        0 if the limited run kept its limit and all bits; otherwise 1.

    Raises:
        RunFailedError: if one of the runs failed.
    """
    console.print(options.workload.describe())
    plain = _run(options, None, console)
    limit_bytes = parse_bytes(options.limit, total_bytes=plain.peak_tensor_bytes)
    limited = _run(options, replace(options.paging, limit_bytes=limit_bytes), console)
    checks = check_runs(plain, limited, limit_bytes=limit_bytes, anonymous_percent=options.anonymous_percent)
    console.print(step_table(plain, limited))
    console.print(comparison_table(plain, limited, limit_bytes=limit_bytes))
    console.print(check_table(checks))
    runs = {"plain": plain, "limited": limited}
    if options.output is not None:
        timelines = {name: run.timeline for name, run in runs.items()}
        draw_timelines(timelines, limit_bytes=limit_bytes, title=options.workload.describe(), path=options.output)
        print_line(console, f"wrote {options.output}")
    if limited.plan:
        _show_plan(Plan.from_json(limited.plan), options.output, console)
    if options.json is not None:
        document = _document(options, runs, limit_bytes, checks)
        options.json.write_text(json.dumps(document, indent=1) + "\n")
        print_line(console, f"wrote {options.json}")
    return 0 if all(check.ok for check in checks) else 1


def _show_plan(plan: Plan, output: Path | None, console: Console) -> None:
    print_line(console, str(plan))
    if output is not None:
        drawn = draw_plan(plan, output.with_name(f"plan{output.suffix}"))
        print_line(console, f"wrote {drawn}")


def _run(options: TrainOptions, paging: Paging | None, console: Console) -> RunResult:
    name = "plain" if paging is None else "limited"
    with RunProgress(console, name=name, steps=options.workload.steps) as progress:
        return run_in_fresh_process(options.workload, paging, progress.show)


def _document(
    options: TrainOptions, runs: dict[str, RunResult], limit_bytes: int, checks: list[Check]
) -> dict[str, Any]:
    """Everything that was measured, and what it depends on."""
    return {
        "command": " ".join(["python", "-m", "torch_lms", *sys.argv[1:]]),
        "environment": _environment(options.workload),
        "workload": asdict(options.workload),
        "limit": options.limit,
        "limit_bytes": limit_bytes,
        "checks": [asdict(check) for check in checks],
        "runs": {name: asdict(run) for name, run in runs.items()},
    }


def _environment(workload: Workload) -> dict[str, Any]:
    device = torch.device(workload.device)
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_lms": torch_lms.__version__,
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    }
