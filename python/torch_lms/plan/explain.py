"""A plan for people: a table, and a picture of memory over time with the three streams below."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_lms.memory_sizes import GIB
from torch_lms.plan.decision import KEEP
from torch_lms.plan.document import Plan, PlannedStorage
from torch_lms.plan.timeline import IN, OUT

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["draw_plan", "plan_table"]

_MS = 1e3
_SMALLEST_GAP = 1 / 3000  # of the cycle: bars that are closer are drawn as one
_COLORS = {
    "forward": "#4c8fd0",
    "backward": "#59a869",
    "other": "#9aa5b1",
    "replay": "#d9533c",
    OUT: "#d9a441",
    IN: "#8e6bbf",
    "in use": "#b9d3ea",
    "swapped": "#f0dcae",
    "dropped": "#f3c4bb",
    "limit": "#c0392b",
}


def plan_table(plan: Plan, most: int = 20) -> RenderableType:
    """What is decided in total, and the decisions that free or cost the most, for rich to print.

    Args:
        plan: what to show.
        most: decisions to show, those of the most bytes first.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"The {most} largest storages that leave, dearest first", title_justify="left")
    for heading in ("storage", "made by", "MiB", "decision", "ms", "why"):
        table.add_column(heading, justify="right" if heading in ("storage", "MiB", "ms") else "left")
    leaving = [one for one in plan.decisions if one.decision != KEEP]
    largest = sorted(leaving, key=lambda one: (-one.bytes, -one.price_us, one.storage))[:most]
    for one in sorted(largest, key=lambda one: (-one.price_us, -one.bytes, one.storage)):
        source = "\n".join(text for text in (one.op, one.module, one.line) if text)
        decision = f"{one.decision}\n{_places(one)}"
        price = f"{one.price_us / _MS:.2f}"
        cells = (str(one.storage), source, f"{one.bytes / 2**20:.1f}", decision, price, one.reason)
        table.add_row(*(Text(cell) for cell in cells))
    methods = (
        f"{one.name}: {one.note or 'nothing'}" if one.step_us is None else f"{one.name}: {one.step_us / _MS:.1f} ms"
        for one in plan.methods
    )
    head = Text("\n".join((str(plan), *(f"  {line}" for line in methods))))
    return Group(head, table) if largest else Group(head)


def _places(one: PlannedStorage) -> str:
    back = "on use" if one.in_after is None else str(one.in_after)
    return f"{one.out_after}, {back}"


def draw_plan(plan: Plan, path: str | Path) -> Path:
    """Draws the predicted cycle: memory against the limit, compute with its replays, copies out and in.

    Args:
        plan: what to draw.
        path: of the picture; its ending (svg, png, pdf) says what is written.

    Returns:
        The path.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 6.5), layout="constrained")
    memory, lanes = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.4))
    known = plan.predicted
    figure.suptitle(
        f"{plan.device}: {known.step_us / _MS:.1f} ms a step under {plan.limit_bytes / GIB:.2f} GiB "
        f"(plain {known.plain_us / _MS:.1f} ms with {known.plain_peak_bytes / GIB:.2f} GiB)"
    )
    _draw_memory(memory, plan)
    _draw_lanes(lanes, plan)
    figure.savefig(path, dpi=120)
    return Path(path)


def _draw_memory(axes: Any, plan: Plan) -> None:
    """Stacks what is in use, on the host and dropped; each op's bytes hold until the next one begins."""
    line = plan.timeline
    times = [time / _MS for time in (*line.start_us, line.end_us[-1])]
    parts = {"in use": line.memory_bytes, "swapped": line.swapped_bytes, "dropped": line.dropped_bytes}
    below = [0.0] * len(times)
    for name, values in parts.items():
        above = [low + size / GIB for low, size in zip(below, (*values, values[-1]), strict=True)]
        axes.fill_between(times, below, above, step="post", color=_COLORS[name], label=name, linewidth=0)
        below = above
    axes.axhline(plan.limit_bytes / GIB, color=_COLORS["limit"], linestyle="--", label="limit")
    axes.set_ylabel("Memory (GiB)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right", framealpha=0.9)


def _draw_lanes(axes: Any, plan: Plan) -> None:
    line, least_us = plan.timeline, plan.predicted.step_us * _SMALLEST_GAP
    lanes: list[tuple[str, float, list[tuple[float, float]]]] = []
    for phase in ("forward", "backward", "other"):
        ran = [
            (start + replay, end)
            for op, start, replay, end in zip(plan.ops, line.start_us, line.replay_us, line.end_us, strict=True)
            if op.phase == phase
        ]
        lanes.append((phase, 2.0, ran))
    replays = [(start, start + spent) for start, spent in zip(line.start_us, line.replay_us, strict=True) if spent]
    lanes.append(("replay", 2.0, replays))
    for direction, height in ((OUT, 1.0), (IN, 0.0)):
        lanes.append(
            (direction, height, [(one.start_us, one.end_us) for one in line.copies if one.direction == direction])
        )
    for name, height, spans in lanes:
        bars = [(start / _MS, (end - start) / _MS) for start, end in _joined(spans, least_us)]
        if bars:
            axes.broken_barh(bars, (height, 0.8), facecolors=_COLORS[name], label=name, linewidth=0)
    axes.set_yticks([2.4, 1.4, 0.4], ["compute", "out", "in"])
    axes.set_ylim(-0.1, 2.9)
    axes.set_xlabel("Time (ms)")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), framealpha=0.9)


def _joined(spans: Iterable[tuple[float, float]], least_us: float) -> Sequence[tuple[float, float]]:
    """Joins spans whose gap is too small to be seen."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if joined and start - joined[-1][1] < least_us:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined
