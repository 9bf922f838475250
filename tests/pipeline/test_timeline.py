from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torch_lms.pipeline.timeline import MeasuredStep, Timeline, peak_memory_bytes, reset_peak_memory
from torch_lms.schedules.actions import BACKWARD, FORWARD, Action
from torch_lms.schedules.simulation import Event

MIB = 1 << 20


def test_the_peak_is_that_of_the_device_since_it_was_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {torch.device("cuda:0"): 5 * MIB, torch.device("cuda:1"): 7 * MIB}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", peaks.__getitem__)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peaks.update({device: MIB}))
    first, second = peaks
    reset_peak_memory(second)
    assert (peak_memory_bytes(first), peak_memory_bytes(second)) == (5 * MIB, MIB)


def test_actions_are_timed_on_the_ranks_device_whichever_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    device, timed, waited = torch.device("cuda", 1), [], []
    event = SimpleNamespace(record=lambda stream=None: timed.append(stream), elapsed_time=lambda other: 2.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda **kwargs: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda of=None: of)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda of=None: waited.append(of))
    timeline = Timeline(device)
    timeline.enabled = True
    timeline.start()
    timeline.begin(Action(0, FORWARD, 0))
    timeline.end(Action(0, FORWARD, 0))
    assert [found.end_us for found in timeline.events(1)] == [2000.0]
    assert (timed, waited) == ([device] * 3, [device])


def test_the_cpu_does_not_count() -> None:
    reset_peak_memory(torch.device("cpu"))
    assert peak_memory_bytes(torch.device("cpu")) is None


def events_of(ranks: int, stages: int) -> tuple[Event, ...]:
    """Forwards of 2 ms and backwards of 4 ms, of two microbatches."""
    return tuple(
        Event(stage % ranks, Action(stage, kind, microbatch), 0.0, end_us)
        for stage in range(stages)
        for kind, end_us in ((FORWARD, 2e3), (BACKWARD, 4e3))
        for microbatch in range(2)
    )


def table_of(step: MeasuredStep, stages: int, device: str) -> tuple[list[list[Any]], str]:
    """The cells that `python -m torch_lms pipeline` shows, and what stands below them."""
    pytest.importorskip("rich")
    from torch_lms.cli.pipeline import _measured_table

    figures: Any = SimpleNamespace(
        step=SimpleNamespace(step_us=9e3),
        stage_forward_us=(1e3,) * stages,
        stage_backward_us=(3e3,) * stages,
        stage_memory_bytes=(MIB,) * stages,
        device_memory_bytes=(10 * MIB, 20 * MIB),
    )
    table = _measured_table(figures, step, 2, torch.device(device))
    return [list(row) for row in zip(*(column.cells for column in table.columns), strict=True)], str(table.caption)


def test_measured_peaks_stand_beside_predicted_ones() -> None:
    step = MeasuredStep(events=events_of(2, 2), peak_memory_bytes=(11 * MIB, 19 * MIB + MIB // 2))
    rows, caption = table_of(step, 2, "cuda")
    assert rows == [
        ["0", "2.00", "1.00", "4.00", "3.00", "11.0", "10.0"],
        ["1", "2.00", "1.00", "4.00", "3.00", "19.5", "20.0"],
    ]
    assert "none measured" not in caption


def test_stages_of_one_device_have_its_peak() -> None:
    step = MeasuredStep(events=events_of(2, 4), peak_memory_bytes=(11 * MIB, 19 * MIB))
    rows, _ = table_of(step, 4, "cuda")
    assert [row[-2:] for row in rows] == [["11.0", "10.0"], ["19.0", "20.0"]] * 2


def test_where_nothing_counts_the_cell_is_empty_and_the_table_says_why() -> None:
    rows, caption = table_of(MeasuredStep(events=events_of(2, 2), peak_memory_bytes=(None, None)), 2, "cpu")
    assert [row[-2:] for row in rows] == [["", "10.0"], ["", "20.0"]]
    assert "none measured, for cpu does not count its allocations" in caption
