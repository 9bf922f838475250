"""The benchmark of chunks, with a tiny GPT on the CPU: bits, columns and files; never a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.fresh_process import run_python
from tests.unit.markers import counts_exactly


@pytest.mark.slow
@counts_exactly
def test_rows_say_how_much_of_their_updates_is_hidden(tmp_path: Path) -> None:
    rows = "plain,device,host-backward,stream-backward"
    words = ("--tiny", "--hidden", "--keep", "--steps", "2", "--only", rows, "--output-dir", str(tmp_path))
    done = run_python("-m", "benchmarks.chunked", *words)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {row["key"]: row for row in json.loads((tmp_path / "chunked.json").read_text())["rows"]}
    assert list(found) == rows.split(",")
    assert [found[key]["equal"] for key in ("plain", "device", "stream-backward")] == ["yes"] * 3
    assert "hidden_share" not in found["plain"]
    assert "hidden_share" not in found["device"]
    assert 0 <= found["host-backward"]["hidden_share"] <= 1
    assert found["stream-backward"]["hidden_share"] == 0  # the processor itself does them
    for key in ("host-backward", "stream-backward"):
        trace = json.loads((tmp_path / "plans" / f"chunked-{key}.updates.json").read_text())
        assert "update" in {event["name"] for event in trace["traceEvents"]}


def test_chunks_waste_no_more_than_patrickstars_and_take_14_bytes_a_parameter(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    done = run_python("-m", "benchmarks.chunk_layout", "--tiny", "--output-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    document = json.loads((tmp_path / "chunk_layout.json").read_text())
    assert len(document["checks"]) == len(document["rows"]) + 1
    assert all(check["ok"] for check in document["checks"]), document["checks"]
