"""Pipeline charts: one row for each rank, time from left to right, predicted and measured, as SVG or PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_lms.errors import PipelineError
from torch_lms.schedules.actions import BACKWARD, FORWARD, INPUT_BACKWARD, WEIGHT_BACKWARD, Action, Schedule
from torch_lms.schedules.simulation import Event, events_of, tasks_of
from torch_lms.schedules.traffic import expected_us, in_turn

__all__ = ["draw_charts", "predict"]

_COLORS = {FORWARD: "#4c8fd0", BACKWARD: "#59a869", INPUT_BACKWARD: "#8cc99a", WEIGHT_BACKWARD: "#d9a441"}
_MEANINGS = {
    FORWARD: "forward",
    BACKWARD: "backward",
    INPUT_BACKWARD: "backward of inputs",
    WEIGHT_BACKWARD: "of weights",
}
_MOST_LABELS = 400


def predict(
    schedule: Schedule,
    forward_us: Sequence[float],
    backward_us: Sequence[float],
    send_us: Sequence[float] | None = None,
    back_us: Sequence[float] | None = None,
    *,
    weights_us: Sequence[float] | None = None,
    transfers_in_turn: bool = False,
) -> list[Event]:
    """When each action will run.

    Args:
        schedule: what runs.
        forward_us: of one microbatch in each stage.
        backward_us: as ``forward_us``.
        send_us: what goes over each border in a forward; nothing if left out.
        back_us: in a backward; as ``send_us``.
        weights_us: of a backward in two parts, what that of weights takes; half of it, and all of it in the first stage
            if left out.
        transfers_in_turn: whether a rank has one transfer at a time.

    Raises:
        PipelineError: if there is not one time for each stage and border.
    """
    borders = schedule.stages - 1
    send_us, back_us = ([0.0] * borders if given is None else given for given in (send_us, back_us))
    found = len(forward_us), len(backward_us), len(send_us), len(back_us)
    if found != (schedule.stages, schedule.stages, borders, borders):
        raise PipelineError(
            f"expected times of {schedule.stages} stages and of the borders between them, found {found}"
        )

    def transfer(action: Action) -> float:
        return send_us[action.stage] if action.kind == FORWARD else back_us[action.stage - 1]

    if weights_us is None:
        weights_us = [took_us / 2 if stage else took_us for stage, took_us in enumerate(backward_us)]
    duration_us, tasks = expected_us((forward_us, backward_us, weights_us)), tasks_of(schedule)
    return events_of(in_turn(tasks, duration_us) if transfers_in_turn else tasks, duration_us, transfer)


def draw_charts(charts: Mapping[str, Sequence[Event]], path: str | Path, *, title: str = "") -> Path:
    """Draws charts below one another on one time axis.

    Args:
        charts: events by heading, such as ``predicted`` and ``measured``.
        path: ends with ``.svg`` or ``.png``.
        title: of the picture.

    Returns:
        The path.

    Raises:
        PipelineError: for another kind of file, no events, or without matplotlib.
    """
    path = Path(path)
    if path.suffix not in (".svg", ".png"):
        raise PipelineError(f"expected a file that ends with .svg or .png, found {path.name!r}; name it so")
    if not charts or not all(charts.values()):
        raise PipelineError("expected events in each chart, found none; measure a step first")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PipelineError(
            "expected matplotlib for pictures, found none; install it: pip install matplotlib"
        ) from error
    ranks = 1 + max(event.rank for events in charts.values() for event in events)
    figure = Figure(figsize=(12, len(charts) * (0.9 + 0.45 * ranks) + 0.6), layout="constrained")
    rows = figure.subplots(len(charts), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (heading, events) in zip(rows, charts.items(), strict=False):
        _draw(axes, heading, events, ranks)
    rows[-1].set_xlabel("ms")
    _add_legend(figure, {event.action.kind for events in charts.values() for event in events})
    if title:
        figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path


def _draw(axes: Any, heading: str, events: Sequence[Event], ranks: int) -> None:
    begin_us = min(event.start_us for event in events)
    end_us = max(event.end_us for event in events)
    for event in events:
        start, width = (event.start_us - begin_us) / 1e3, (event.end_us - event.start_us) / 1e3
        shade = 1.0 if event.action.stage // ranks % 2 == 0 else 0.65  # a rank's stages apart
        axes.barh(
            event.rank, width, left=start, height=0.8, color=_COLORS[event.action.kind], alpha=shade, edgecolor="white"
        )
        if len(events) <= _MOST_LABELS:
            axes.text(start + width / 2, event.rank, str(event.action.microbatch), ha="center", va="center", fontsize=7)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.invert_yaxis()
    idle = 1 - sum(event.end_us - event.start_us for event in events) / (ranks * max(end_us - begin_us, 1e-9))
    axes.set_title(
        f"{heading}: {(end_us - begin_us) / 1e3:.2f} ms, {100 * max(0.0, idle):.0f} % idle", loc="left", fontsize=10
    )
    axes.spines[["top", "right"]].set_visible(False)


def _add_legend(figure: Any, kinds: set[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=color, label=_MEANINGS[kind]) for kind, color in _COLORS.items() if kind in kinds]
    figure.legend(handles=handles, loc="outside lower right", ncols=len(handles), frameon=False, fontsize=8)
