"""The comparison of all algorithms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from tests.partition.graphs import chain, unet
from torch_lms.errors import PartitionError
from torch_lms.partition import DeviceSpec, LinkSpec, PartitionProblem, algorithm_names
from torch_lms.partition.compare import compare


def problem(cap: int | None = None) -> PartitionProblem:
    devices = tuple(DeviceSpec(name=f"d{index}", memory_cap_bytes=cap) for index in range(3))
    return PartitionProblem(graph=unet(depth=3, repeats=2), devices=devices, links=LinkSpec(bytes_per_us=1e4))


def test_every_algorithm_has_a_row_with_times_memory_transfers_and_bubble() -> None:
    rows = compare(problem()).to_json()
    assert [row["algorithm"] for row in rows] == list(algorithm_names())
    for row in rows:
        assert [len(row[key]) for key in ("stage_ms", "stage_mib", "cut_mib")] == [3, 3, 2]
        assert 0 <= row["bubble"] < 1
        assert row["imbalance"] == pytest.approx(row["slowest_ms"] * 3 / sum(row["stage_ms"]))
    assert json.loads(json.dumps(rows)) == rows


def test_the_table_shows_each_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    Console(width=300).print(compare(problem()).table())
    shown = capsys.readouterr().out
    for name in algorithm_names():
        assert name in shown


def test_what_finds_nothing_is_a_row_that_says_why() -> None:
    rows = compare(problem(cap=1000), ["dp", "uniform"]).to_json()
    assert [row["fits"] for row in rows] == [False, False]
    assert "least cap that works" in rows[0]["remark"]
    assert rows[0]["step_ms"] is None
    assert rows[1]["step_ms"] is not None


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_picture_is_drawn(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"stages.{suffix}"
    compare(problem(cap=1 << 40), ["dp", "uniform"]).draw(path)
    assert path.read_bytes()[:5] == {"png": b"\x89PNG\r", "svg": b"<?xml"}[suffix]


def test_nothing_to_draw_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PartitionError, match="expected a partition to draw, found none"):
        compare(problem(cap=1000), ["dp"]).draw(tmp_path / "stages.png")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(PartitionError, match="expected an algorithm among"):
        compare(PartitionProblem(graph=chain([1.0]), devices=(DeviceSpec(name="d"),)), ["best"])
