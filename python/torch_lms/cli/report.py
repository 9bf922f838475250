"""What the commands show: progress while they run, tables at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from torch_lms.cli.checks import Check
from torch_lms.cli.run import RunResult, StepDone
from torch_lms.memory_sizes import GIB

__all__ = ["RunProgress", "check_table", "comparison_table", "section_table", "step_table"]


class RunProgress:
    """A progress bar with the loss; where there is no terminal, a line for each step.

    Args:
        console: where it shows.
        name: of the run.
        steps: how many there will be.
    """

    def __init__(self, console: Console, *, name: str, steps: int) -> None:
        self._console = console
        self._name = name
        self._steps = steps
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[loss]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(f"{name} run", total=steps, loss="starts")

    def __enter__(self) -> RunProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, done: StepDone) -> None:
        """Shows that a step has ended."""
        loss = f"loss {done.loss:.4f}, {done.seconds:.2f} s a step"
        if self._console.is_terminal:
            self._progress.update(self._task, advance=1, loss=loss)
        else:
            self._console.print(f"{self._name} run, step {done.step}/{self._steps}: {loss}")


def comparison_table(plain: RunResult, limited: RunResult, *, limit_bytes: int) -> Table:
    """Plain against limited, with their ratio where it says something."""
    table = Table(title="Plain against limited")
    for heading in ("", "plain", "limited", "limited / plain"):
        table.add_column(heading, justify="left" if not heading else "right")
    rows: list[tuple[str, Callable[[RunResult], float], str]] = [
        ("Step, median (s)", median_step_s, "{:.2f}"),
        ("Peak tensor bytes (GiB)", lambda run: run.peak_tensor_bytes / GIB, "{:.3f}"),
        ("Peak anonymous memory (GiB)", lambda run: run.peak_anonymous_bytes / GIB, "{:.3f}"),
    ]
    table.add_row("Limit (GiB)", "", f"{limit_bytes / GIB:.3f}", "")
    for title, value_of, form in rows:
        values = value_of(plain), value_of(limited)
        ratio = f"{values[1] / values[0]:.2f}" if values[0] else ""
        table.add_row(title, *(form.format(value) for value in values), ratio)
    steps = max(len(limited.steps), 1)
    for title, key, unit, form in (
        ("Paged out a step (GiB)", "pageout_bytes", GIB, "{:.2f}"),
        ("Paged in a step (GiB)", "pagein_bytes", GIB, "{:.2f}"),
        ("Faults a step", "passive_pageins", 1, "{:.1f}"),
        ("Prefetch hits a step", "prefetch_hits", 1, "{:.1f}"),
    ):
        table.add_row(title, *(form.format(run.stats[key] / unit / steps) for run in (plain, limited)), "")
    return table


def step_table(plain: RunResult, limited: RunResult) -> Table:
    """How the limited run's steps go, as a plan is learned: time against plain's median, and what moves."""
    table = Table(title="Limited, step by step")
    for heading in ("step", "", "time / plain", "paged out (GiB)", "made again (GiB)"):
        table.add_column(heading, justify="left" if not heading else "right")
    plain_s = median_step_s(plain)
    for step in limited.steps:
        table.add_row(
            str(step.step),
            "planned" if step.planned else "on demand",
            f"{step.seconds / plain_s:.2f}" if plain_s else "",
            f"{step.pageout_bytes / GIB:.3f}",
            f"{step.recomputed_bytes / GIB:.3f}",
        )
    return table


def median_step_s(run: RunResult) -> float:
    """The median time of a run's steps, without the first, which warms up, where there are more."""
    seconds = sorted(step.seconds for step in run.steps[1:] or run.steps)
    return seconds[len(seconds) // 2]


def check_table(checks: Sequence[Check]) -> Table:
    """What was promised and what was found."""
    table = Table(title="Checks")
    for heading in ("", "expected", "found", ""):
        table.add_column(heading)
    for check in checks:
        table.add_row(check.what, check.expected, check.found, "[green]ok[/]" if check.ok else "[bold red]MISSED[/]")
    return table


def section_table(title: str, rows: Mapping[str, str]) -> Table:
    """Facts under a title."""
    table = Table(title=title, show_header=False, title_justify="left")
    for name, value in rows.items():
        table.add_row(name, value)
    return table
