from __future__ import annotations

from pathlib import Path

import pytest

from torch_lms.errors import PipelineError
from torch_lms.pipeline.chart import draw_charts, predict
from torch_lms.schedules.rules import interleaved, one_f_one_b


def test_prediction_of_equal_stages_has_the_known_bubble() -> None:
    events = predict(one_f_one_b(4, 8), [10.0] * 4, [20.0] * 4)
    assert max(event.end_us for event in events) == (8 + 3) * 30.0


def test_prediction_waits_for_transfers() -> None:
    events = predict(one_f_one_b(2, 1), [10.0, 10.0], [20.0, 20.0], [5.0], [5.0])
    assert max(event.end_us for event in events) == 10 + 5 + 10 + 20 + 5 + 20


@pytest.mark.parametrize(("name", "begins"), [("chart.svg", b"<?xml"), ("chart.png", b"\x89PNG")])
def test_charts_are_drawn_into_a_file(tmp_path: Path, name: str, begins: bytes) -> None:
    pytest.importorskip("matplotlib")
    events = predict(interleaved(2, 4, 4), [1e3] * 4, [2e3] * 4)
    written = draw_charts({"predicted": events, "measured": events}, tmp_path / "new" / name, title="two ranks")
    assert written.read_bytes().startswith(begins)


@pytest.mark.parametrize(("charts", "name"), [({"a": []}, "chart.svg"), ({}, "chart.svg"), ({"a": [1]}, "chart.jpg")])
def test_nothing_to_draw_and_other_files_are_refused(tmp_path: Path, charts: dict[str, list[int]], name: str) -> None:
    with pytest.raises(PipelineError, match=r"chart|\.svg"):
        draw_charts(charts, tmp_path / name)  # type: ignore[arg-type]


def test_prediction_needs_a_time_for_each_stage() -> None:
    with pytest.raises(PipelineError, match="times of 2 stages"):
        predict(one_f_one_b(2, 1), [1.0], [1.0, 1.0])
