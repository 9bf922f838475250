"""The benchmark of chunks on several ranks, with a tiny GPT on the CPU: bits, columns and files; never a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.ranks import run_as_torchrun

pytestmark = pytest.mark.slow


def run(folder: Path, *words: str) -> dict[str, Any]:
    tiny = ("--tiny", "--device", "cpu", "--steps", "2", "--output-dir", str(folder))
    run_as_torchrun(folder, "benchmarks.chunk_ranks", *tiny, *words)
    document: dict[str, Any] = json.loads((folder / "chunk_ranks_2.json").read_text())
    return document


def test_two_ranks_train_as_one_does_and_every_row_has_its_figures(tmp_path: Path) -> None:
    document = run(tmp_path)
    found = {row["key"]: row for row in document["rows"]}
    assert list(found) == ["one", "all", "collectives", "fsdp", "accumulated"]
    assert not [row for row in found.values() if "error" in row]
    assert document["command"].startswith("torchrun --nproc-per-node 2 -m benchmarks.chunk_ranks --tiny")
    assert found["all"]["equal"] == "yes"
    assert found["all"]["loss_difference"] == 0
    assert [check["ok"] for check in document["checks"]] == [True]
    losses = {key: found[key]["losses"] for key in ("one", "all", "accumulated")}
    assert losses["one"][0][0] == losses["all"][0][0]
    assert losses["all"][0][0] != losses["all"][0][1]  # each rank has a batch of its own
    assert losses["accumulated"] == losses["all"][: len(losses["accumulated"])]
    for key in ("one", "all", "fsdp"):
        assert len(found[key]["step_ms_all"]) == 2
        assert found[key]["scaling"] == found[key]["tflops"] / found["one"]["tflops"]
    assert found["all"]["peak_bytes"] < found["one"]["peak_bytes"]
    assert found["collectives"]["chunks"] > 1
    for name in ("gather", "reduce"):
        assert found["collectives"][f"{name}_ratio"] > 0


def test_rows_that_fail_are_told_and_the_others_go_on(tmp_path: Path) -> None:
    document = run(tmp_path, "--only", "one,all", "--row-seconds", "0.01")
    assert ["no answer within" in row["error"] for row in document["rows"]] == [True, True]
    assert document["rows"][1]["error"].count("rank ") == 2
    document = run(tmp_path, "--only", "all")
    assert ["error" in row for row in document["rows"]] == [True, False]
    document = run(tmp_path, "--seconds", "1")
    assert "step_ms" in document["rows"][1]  # what there was stays
    assert all("nearly over" in row["error"] for row in document["rows"] if row["key"] != "all")


def test_the_order_of_use_matters_where_layers_lie_apart(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run_as_torchrun(tmp_path, "benchmarks.chunk_order", "--output-dir", str(tmp_path))
    rows = json.loads((tmp_path / "chunk_order.json").read_text())["rows"]
    found = {(row["model"], row["order"]): (row["gathered_chunks"], row["most_whole"]) for row in rows}
    for model in ("GPT", "T5", "Whisper", "3D U-Net"):
        assert found[model, "use"] == found[model, "registration"]
    for use, registration in zip(found["XLM", "use"], found["XLM", "registration"], strict=True):
        assert use < registration
