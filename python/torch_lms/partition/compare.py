"""Every algorithm side by side on one problem: a table, JSON, and a picture."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_lms.errors import PartitionError
from torch_lms.partition.algorithms import algorithm_names, find_algorithm
from torch_lms.partition.interface import Partition, PartitionProblem

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Comparison", "Row", "compare"]

_MOST_WRITTEN = 16  # values in a row
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one algorithm made.

    Attributes:
        algorithm: its name.
        partition: None if it found none.
        remark: why it found none, or its reason.
        planning_s: how long it took.
    """

    algorithm: str
    partition: Partition | None
    remark: str
    planning_s: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The rows of all algorithms, in the order in which they were asked."""

    problem: PartitionProblem
    rows: tuple[Row, ...]

    def to_json(self) -> list[dict[str, Any]]:
        """A row for each algorithm, ready for ``json.dump``."""
        return [_figures(row) for row in self.rows]

    def table(self) -> Table:
        """For the terminal, by rich: stage time, memory, communication and bubble of each algorithm."""
        table = _rich_table(f"{self.problem.stages} stages, {len(self.problem.units)} nodes")
        best = min((row["step_ms"] for row in self.to_json() if row["fits"]), default=None)
        for row in self.to_json():
            style = "bold" if row["step_ms"] == best else "" if row["fits"] else "dim"
            table.add_row(*(_cell(row, key, form) for key, _, form in _COLUMNS), style=style)
        return table

    def draw(self, path: str | Path) -> None:
        """Draws heat maps of stage times and stage memories, a row for each algorithm, into a .png, .svg or .pdf file.

        Raises:
            PartitionError: if matplotlib is not installed, or no algorithm has found a partition.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise PartitionError(
                "expected matplotlib for a picture, found none; pip install 'torch-lms[cli]'"
            ) from error
        made = [row.partition for row in self.rows if row.partition is not None]
        if not made:
            raise PartitionError("expected a partition to draw, found none by any algorithm; see what the table says")
        figure = Figure(figsize=(12, 1.5 + 0.4 * len(made)), layout="constrained")
        times, memories = figure.subplots(1, 2, sharey=True)
        bound_ms = self.problem.lower_bound_us / 1e3
        usable = max(made[0].figures.usable_bytes)
        cap = "" if usable == float("inf") else f", of {usable / _MIB:.0f} usable"
        times.set_title(f"time of a microbatch in each stage (ms), the longest at least {bound_ms:.3g}", fontsize=10)
        memories.set_title(f"memory of each stage (MiB{cap})", fontsize=10)
        _draw_heat(figure, times, [[time_us / 1e3 for time_us in one.stage_time_us] for one in made])
        _draw_heat(figure, memories, [[nbytes / _MIB for nbytes in one.stage_memory_bytes] for one in made])
        names = [one.algorithm if one.fits else f"{one.algorithm} (no room)" for one in made]
        times.set_yticks(range(len(names)), names)
        figure.savefig(path)


_COLUMNS = (
    ("algorithm", "Algorithm", "{}"),
    ("step_ms", "Step (ms)", "{:.2f}"),
    ("slowest_ms", "Slowest stage (ms)", "{:.3f}"),
    ("imbalance", "Slowest / mean", "{:.3f}"),
    ("stage_ms", "Stage times (ms)", "{}"),
    ("stage_mib", "Stage memory (MiB)", "{}"),
    ("cut_mib", "Over borders (MiB)", "{}"),
    ("bubble", "Bubble", "{:.1%}"),
    ("fits", "Fits", "{}"),
    ("planning_s", "Planned in (s)", "{:.2f}"),
)


def compare(problem: PartitionProblem, algorithms: Sequence[str] | None = None) -> Comparison:
    """Asks algorithms for a partition of the same problem.

    Args:
        problem: the graph, the devices and the prices.
        algorithms: names; by default all of them.

    Raises:
        PartitionError: for an unknown name. What finds no partition becomes a row that says so.
    """
    rows = []
    for name in algorithm_names() if algorithms is None else algorithms:
        algorithm = find_algorithm(name)
        begin = time.perf_counter()
        made: Partition | None = None
        try:
            made = algorithm.partition(problem)
            remark = made.reason
        except PartitionError as error:
            remark = str(error)
        rows.append(Row(algorithm=name, partition=made, remark=remark, planning_s=time.perf_counter() - begin))
    return Comparison(problem=problem, rows=tuple(rows))


def _figures(row: Row) -> dict[str, Any]:
    made = row.partition
    known: dict[str, Any] = {
        "algorithm": row.algorithm,
        "fits": made is not None and made.fits,
        "remark": row.remark,
        "planning_s": row.planning_s,
    }
    if made is None:
        return known | dict.fromkeys((key for key, _, _ in _COLUMNS if key not in known))
    return known | {
        "step_ms": made.step_us / 1e3,
        "slowest_ms": made.bottleneck_us / 1e3,
        "lower_bound_ms": made.lower_bound_us / 1e3,
        "imbalance": made.imbalance,
        "stage_ms": [time_us / 1e3 for time_us in made.stage_time_us],
        "stage_mib": [nbytes / _MIB for nbytes in made.stage_memory_bytes],
        "cut_mib": [nbytes / _MIB for nbytes in made.cut_bytes],
        "bubble": made.bubble,
        "devices": list(made.devices),
    }


def _cell(row: dict[str, Any], key: str, form: str) -> str:
    value = row[key]
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return " ".join(_short(one) for one in value)
    return form.format(value)


def _rich_table(title: str) -> Table:
    try:
        from rich.table import Table
    except ImportError as error:
        raise PartitionError("expected rich for a table, found none; pip install 'torch-lms[cli]'") from error
    table = Table(title=title)
    for key, heading, _ in _COLUMNS:
        table.add_column(heading, justify="left" if key == "algorithm" else "right")
    return table


def _draw_heat(figure: Any, axes: Any, rows: Sequence[Sequence[float]]) -> None:
    """A cell for each stage, its color by its value, which is written into it where there is room."""
    most = max(max(row) for row in rows)
    image = axes.imshow(rows, aspect="auto", cmap="viridis", vmin=0.0, vmax=most or 1.0)
    figure.colorbar(image, ax=axes)
    axes.set_xticks(range(len(rows[0])))
    axes.set_xlabel("stage")
    for index, row in enumerate(rows):
        for stage, value in enumerate(row if len(row) <= _MOST_WRITTEN else ()):
            color = "white" if value < 0.6 * most else "black"
            axes.text(stage, index, _short(value), ha="center", va="center", fontsize=7, color=color)


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
