"""The benchmarks about plans, with a tiny GPT on the CPU: bits, fields and files; never a time."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.equal_peak import check_rows, compare
from benchmarks.largest import QUESTIONS, Search
from benchmarks.plan_picture import draw
from benchmarks.plan_worker import Run
from benchmarks.size_search import search
from benchmarks.training import GIB
from tests.unit.fresh_process import run_python
from tests.unit.markers import counts_exactly

ROWS = ("plain", "ours-70", "checkpoint-2")


def run_plans(folder: Path, rows: str, *words: str) -> dict[str, Any]:
    command = ("-m", "benchmarks.plans", "--tiny", "--only", rows, "--output-dir", str(folder), "--steps", "4", *words)
    done = run_python(*command)
    assert done.returncode == 0, done.stderr[-3000:]
    document: dict[str, Any] = json.loads((folder / "plans.json").read_text())
    return document


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


@pytest.fixture(scope="module")
def document(folder: Path) -> dict[str, Any]:
    return run_plans(folder, ",".join(ROWS), "--keep")


@pytest.mark.slow
@counts_exactly
def test_a_planned_gpt_is_bit_equal_within_its_limit(document: dict[str, Any]) -> None:
    plain, ours, checkpointed = document["rows"]
    assert [row["key"] for row in document["rows"]] == list(ROWS)
    assert [row["equal"] for row in document["rows"]] == ["yes"] * 3
    assert ours["digest"] == plain["digest"] == plain["digest_before"]
    assert ours["most_gib"] * 2**30 <= ours["limit_bytes"] < plain["peak_bytes"]
    assert ours["followed"]
    assert ours["out_gib"] + ours["recomputed_gib"] > 0
    assert checkpointed["peak_bytes"] < plain["peak_bytes"]


@pytest.mark.slow
@counts_exactly
def test_rows_have_what_tables_and_checks_need(document: dict[str, Any], folder: Path) -> None:
    ours = document["rows"][1]
    shown = {key for key, _, _ in document["columns"]} - {"fastest_peer", "over_peer"}
    assert shown <= ours.keys()
    assert {"predicted_ms", "bound_ms", "method", "decided", "learning_ms_all", "share_in_step"} <= ours.keys()
    assert all(row["exit_status"] == 0 for row in document["rows"])
    assert (folder / "plans" / "plans-ours-70.plan.json.gz").is_file()
    assert (folder / "plans" / "plans-ours-70.trace.json.gz").is_file()
    assert {check["what"].split(": ")[1] for check in document["checks"]} >= {"bit-equal", "peak within the limit"}


@pytest.mark.slow
@counts_exactly
def test_a_row_that_fails_is_a_missed_check_and_the_others_stay(document: dict[str, Any], folder: Path) -> None:
    again = run_plans(folder, "ours-60", "--row-seconds", "0.01")
    by_key = {row["key"]: row for row in again["rows"]}
    assert by_key["plain"] == document["rows"][0]
    assert "no answer" in by_key["ours-60"]["error"]
    assert [check["what"] for check in again["checks"] if "ran" in check["what"]] == ["ours, 60% of plain's peak ran"]


@pytest.mark.slow
@counts_exactly
def test_the_picture_is_drawn_from_the_file_alone(document: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = draw(document, tmp_path / "plans.svg")
    assert drawn == ["ours", "plain", "checkpoint"]
    assert "step time / plain" in (tmp_path / "plans.svg").read_text()


def row_of(**changed: Any) -> dict[str, Any]:
    row = {"key": "one", "mode": "one", "device": "cuda", "step_ms": 10.0, "peak_bytes": 100, "digest": "a"}
    return {**row, "digest_before": "a", "losses": [1.0, 1.0], **changed}


def test_bits_are_compared_with_a_plain_run_that_repeats_itself() -> None:
    plain = row_of()
    assert compare(row_of(losses=[1.0] * 5, step_ms=12.0), plain)["equal"] == "yes"
    assert compare(row_of(losses=[1.0, 1.5]), plain)["equal"] == "no"
    assert compare(row_of(digest="b"), plain)["equal"] == "no"
    assert compare(row_of(digest="b"), row_of(digest_before="c"))["equal"] == "no, nor is plain to itself"
    assert compare(row_of(step_ms=12.0), plain)["ratio"] == pytest.approx(1.2)


def test_the_fastest_peer_needs_no_more_memory() -> None:
    ours = {**row_of(key="ours", most_gib=0.0, reserved_gib=0.0, limit_bytes=100), "monotone": True, "equal": "yes"}
    del ours["digest_before"]
    ours["ratio"] = 1.0
    others = [row_of(key=str(peak), mode=f"{peak}", peer=True, peak_bytes=peak, ratio=ratio) for peak, ratio in PEERS]
    checks = {check.what: check for check in check_rows([ours, *others])}
    assert ours["fastest_peer"] == "80"
    assert ours["over_peer"] == pytest.approx(10 / 9)
    assert not checks["one: / fastest peer within that"].ok


PEERS = ((50, 2.0), (80, 0.9), (120, 0.5))


@pytest.mark.parametrize("most", [1, 2, 3, 7, 40, 100, 1000])
@pytest.mark.parametrize("start", [1, 5, 60])
def test_the_largest_that_fits_is_found(most: int, start: int) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= most

    found = search(fits, start=start, grain=1)
    assert found <= most < found * 1.1 + 1
    assert len(tried) == len(set(tried))


def test_nothing_fits() -> None:
    assert search(lambda _: False, start=64, grain=8) == 0


class FailsPlanned:
    """A sweep whose runs take a byte for each sample; so many samples are too many for a run with a plan."""

    def __init__(self, too_many: int) -> None:
        self.given = Namespace(tiny=False, search_seconds=60, steps=4, start=None)
        self.device = "cuda"
        self.too_many = too_many

    def attempt(self, _: str, run: Run) -> dict[str, Any]:
        size = run.changed["batch"]
        if run.steps == self.given.steps and size >= self.too_many:
            return {"error": "no room in its fifth step"}
        return {"most_gib": size / GIB, "samples_per_s": 1.0, "tokens": 1, "host_served": 2.0}


def test_a_size_whose_planned_run_fails_makes_way_for_the_next() -> None:
    asked = Search(FailsPlanned(46), "gpt-batch-ours", QUESTIONS["gpt-batch"], "ours", limit_bytes=50)  # type: ignore[arg-type]
    answer = asked.answer()
    assert [one["size"] for one in answer["tried"] if one["fits"]] == [45, 49]
    assert [one["size"] for one in answer["failed"]] == [49]
    assert (answer["largest"], answer["host_served"]) == (45, 2.0)
    assert "no size fits" in Search(asked.sweep, asked.key, asked.question, "ours", limit_bytes=0).answer()["error"]
