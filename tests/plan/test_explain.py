"""Plans for people: the picture, the table, and the commands."""

from __future__ import annotations

import os
import subprocess
import sys
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path

import pytest
from rich.console import Console

from tests.plan.traces import gpt_trace
from torch_lms.cli import main
from torch_lms.plan import KEEP, Plan, make_plan, simulate
from torch_lms.plan.explain import draw_plan, plan_table

TRACE = gpt_trace(layers=2, width=256, tokens=1024, vocabulary=1000)
LIMIT = int(simulate(TRACE, []).peak_bytes * 0.5)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(TRACE, LIMIT)


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    TRACE.save(tmp_path / "trace.json")
    return tmp_path / "trace.json"


def test_the_picture_names_its_parts(plan: Plan, tmp_path: Path) -> None:
    drawn = draw_plan(plan, tmp_path / "plan.svg").read_text()
    assert drawn.startswith("<?xml")
    for words in ("limit", "in use", "swapped", "dropped", "forward", "backward", "Memory (GiB)"):
        assert f"<!-- {words} -->" in drawn, words
    assert ("<!-- replay -->" in drawn) == bool(plan.predicted.recompute_us)


def test_a_plan_that_keeps_all_is_drawn_too(tmp_path: Path) -> None:
    kept = make_plan(TRACE, 10 * LIMIT)
    drawn = draw_plan(kept, tmp_path / "plan.svg").read_text()
    assert "<!-- replay -->" not in drawn
    assert "<!-- limit -->" in drawn


def test_the_table_lists_what_leaves(plan: Plan) -> None:
    console = Console(width=200, record=True, file=StringIO())
    console.print(plan_table(plan, 3))
    shown = console.export_text()
    leaving = sorted((one for one in plan.decisions if one.decision != KEEP), key=lambda one: -one.bytes)
    assert leaving[0].op in shown
    assert "The 3 largest storages that leave" in shown
    for one in plan.methods:
        assert one.name in shown


def test_plan_and_explain_commands(trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    assert main(["plan", str(trace_file), f"--limit={LIMIT}", f"--output={written}"]) == 0
    assert "step " in capsys.readouterr().out
    assert Plan.load(written).limit_bytes == LIMIT
    assert main(["explain", str(written), f"--output={picture}"]) == 0
    shown = capsys.readouterr().out
    assert f"wrote {picture}" in shown
    assert picture.stat().st_size > 0


def test_explain_plans_a_trace_first(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(trace_file), f"--limit={int(1.5 * LIMIT)}", "--no-swap", "--most=0"]) == 0
    shown = capsys.readouterr().out
    assert "recompute" in shown
    assert "drop_unchanged" not in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["explain", "{trace}"], "expected a plan, or a trace and --limit"),
        (["explain", "{missing}"], "expected a document in"),
        (["plan", "{trace}", "--limit=1"], "expected a limit of at least"),
        (["plan", "{trace}", "--limit=much"], "expected a size such as"),
        (["plan", "{trace}", "--limit=1", "--host-limit=1", "--no-recompute"], "bytes of host memory"),
        (["plan", "{picture}", "--limit=1GiB"], "expected torch_lms.trace as JSON"),
        (["explain", "{plan}", "--limit=1GiB"], "expected a trace beside --limit"),
        (["explain", "{plan}", "--no-swap"], "expected a trace beside --limit"),
    ],
)
def test_wrong_words_are_told(
    words: list[str], message: str, trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "picture.json"
    picture.write_text("<svg>")
    assert main(["plan", str(trace_file), f"--limit={LIMIT}", f"--output={tmp_path / 'plan.json'}"]) == 0
    files = {"missing": tmp_path / "none.json", "picture": picture, "plan": tmp_path / "plan.json"}
    given = [word.format(trace=trace_file, **files) for word in words]
    assert main(given) == 1
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("word", "message"), [("--output=plan", "expected a picture that ends in"), ("--most=-1", "expected a number of")]
)
def test_words_without_sense_are_told_before_anything_runs(
    word: str, message: str, trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["explain", str(trace_file), f"--limit={LIMIT}", word])
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_plan_is_written_also_where_nobody_reads_it_to_its_end(trace_file: Path, tmp_path: Path) -> None:
    written = tmp_path / "plan.json"
    command = [sys.executable, "-m", "torch_lms", "plan", str(trace_file), f"--limit={LIMIT}", f"--output={written}"]
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") as unread:
        ended = subprocess.run(command, stdout=unread, stderr=subprocess.PIPE, text=True, check=False)
    assert Plan.load(written).limit_bytes == LIMIT
    assert "Traceback" not in ended.stderr


def test_what_a_terminal_cannot_show_is_no_error(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan.save(tmp_path / "plan.json")
    shown = BytesIO()
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(shown, encoding="ascii"))
    assert main(["explain", str(tmp_path / "plan.json"), f"--output={tmp_path / 'bïld.svg'}"]) == 0
    sys.stdout.flush()
    assert b"b?ld.svg" in shown.getvalue()
