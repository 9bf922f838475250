"""The run of PyTorch's own tests: what it writes down, how it goes on, what it compares, and what it misses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
from benchmarks.results import Result
from tests.fork.upstream_session import read
from tests.fork.upstream_tests import MODES, Run, add_row, compare, copy_tests, ended

PROJECT = Path(__file__).resolve().parents[2]
TESTS = """
import os, time, unittest

class TestTorch(unittest.TestCase):
    def test_a_passes(self):
        pass
    def test_b_fails(self):
        self.assertEqual(1, 2)
    def test_c_is_skipped(self):
        self.skipTest("not here")
    def test_d_brings_the_process_down(self):
        print("last words", flush=True)
        os.abort()
    def test_e_is_expected_to_fail(self):
        self.fail()
    test_e_is_expected_to_fail = unittest.expectedFailure(test_e_is_expected_to_fail)
    def test_f_hangs(self):
        time.sleep(600)
    def test_g_passes(self):
        pass
"""
OUTCOMES = {
    "test_a_passes": "passed",
    "test_b_fails": "failed",
    "test_c_is_skipped": "skipped",
    "test_d_brings_the_process_down": "crashed",
    "test_e_is_expected_to_fail": "xfailed",
    "test_f_hangs": "hung",
    "test_g_passes": "passed",
}


@pytest.fixture
def plain(tmp_path: Path) -> Run:
    (tmp_path / "tree" / "test").mkdir(parents=True)
    (tmp_path / "tree" / "test" / "test_torch.py").write_text(TESTS)
    copy_tests(tmp_path / "tree", tmp_path)
    return Run("test_torch", "plain", tmp_path, limit_s=120, test_limit_s=8, seed=0)


def outcomes(run: Run) -> dict[str, str]:
    return {name.rpartition("::")[2]: line["outcome"] for name, line in run.ended().items()}


def write(run: Run, **tests: str) -> None:
    lines = [{"test": "", "outcome": "collected", "count": len(tests)}]
    for name, outcome in tests.items():
        lines.append({"test": name, "outcome": "begun"})
        paging = dict.fromkeys(
            ("occasions", "pageouts", "pageout_bytes", "pageins", "passive_pageins", "prefetch_hits"), 600
        )
        paged = {"paging": {**paging, "cancelled_pageouts": 1}} if run.mode != "plain" else {}
        lines.append({"test": name, "outcome": outcome, "seconds": 1.0, **paged})
    lines.append({"test": "", "outcome": "finished", "status": 0})
    run.journal.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_run_goes_on_behind_tests_that_end_it(plain: Run) -> None:
    assert plain.go()
    assert outcomes(plain) == OUTCOMES
    ended = {name.rpartition("::")[2]: line for name, line in plain.ended().items()}
    assert "1 != 2" in ended["test_b_fails"]["text"]
    assert "Aborted" in ended["test_d_brings_the_process_down"]["text"]


def test_what_has_been_run_is_not_run_again(plain: Run) -> None:
    prefix = "test_torch.py::TestTorch::"
    plain.journal.write_text(
        "".join(json.dumps({"test": prefix + name, "outcome": "passed"}) + "\n" for name in list(OUTCOMES)[1:6])
        + '{"test": "cut o'
    )
    with plain.journal.open("a") as journal:
        journal.write("\n")
    assert plain.go()
    assert set(outcomes(plain).values()) == {"passed"}
    begun = [line["test"] for line in read(plain.journal) if line["outcome"] == "begun"]
    assert begun == [prefix + "test_a_passes", prefix + "test_g_passes"]


def test_a_run_that_takes_too_long_can_be_taken_up(plain: Run) -> None:
    plain.limit_s = 0.0
    assert not plain.go()
    assert not plain.complete()


def test_shares_are_all_tests_and_one_may_run_alone(plain: Run) -> None:
    shares = [replace(plain, share=(i, 3)) for i in range(3)]
    alone = replace(plain, alone="test_torch.py::TestTorch::test_b_fails")
    assert all(run.go() for run in (*shares, alone))
    assert sum(len(run.ended()) for run in shares) == len(OUTCOMES)
    assert {name.rpartition("::")[2]: line["outcome"] for name, line in ended(shares).items()} == OUTCOMES
    assert outcomes(alone) == {"test_b_fails": "failed"}


@pytest.fixture
def both(tmp_path: Path) -> list[list[Run]]:
    """The file in both modes, in two shares each."""
    return [[Run("test_nn", mode, tmp_path, 1, 1, 0, share=(i, 2)) for i in range(2)] for mode in MODES]


@pytest.mark.parametrize(
    ("paged_outcome", "ok"), [("passed", True), ("failed", False), ("crashed", False), ("hung", False)]
)
def test_a_failure_in_the_second_way_alone_is_named(paged_outcome: str, ok: bool, both: list[list[Run]]) -> None:
    first, second = both
    write(first[0], one="passed")
    write(first[1], two="failed", three="skipped")
    write(second[0], one=paged_outcome)
    write(second[1], two="failed", three="skipped")
    for run in (first[0], second[0]):
        write(replace(run, share=(0, 1), alone="one"), one=paged_outcome if run is second[0] else "passed")
    result = Result(name="r", title="t", columns=[])
    for runs in (first, second):
        add_row(result, runs)
    compare(result, first, second)
    assert [check.ok for check in result.checks] == [ok, True, True]
    assert result.checks[0].measured == ("none" if ok else "one")
    assert result.rows[0]["failures"] == ["two"]
    assert (result.rows[1]["tests"], result.rows[1]["skipped"], result.rows[1]["pageouts"]) == (3, 1, 1800)


@pytest.mark.parametrize("outcome", ["passed", "failed"])
def test_what_goes_alike_alone_is_no_failure_of_the_second_way(outcome: str, both: list[list[Run]]) -> None:
    result = Result(name="r", title="t", columns=[])
    for runs, found in zip(both, ("passed", "failed"), strict=True):
        write(runs[0], one=found)
        write(runs[1], two="passed")
        write(replace(runs[0], share=(0, 1), alone="one"), one=outcome)
        add_row(result, runs)
    compare(result, *both)
    assert result.checks[0].ok
    assert result.rows[1]["alone"] == {"one": dict.fromkeys(MODES, outcome)}


def test_what_was_not_run_alone_is_a_failure(both: list[list[Run]]) -> None:
    result = Result(name="r", title="t", columns=[])
    for runs, found in zip(both, ("passed", "failed"), strict=True):
        write(runs[0], one=found)
        add_row(result, runs)
    compare(result, *both)
    assert not result.checks[0].ok


def test_a_run_that_did_nothing_is_no_success(both: list[list[Run]]) -> None:
    first, second = both
    write(first[0], one="passed", two="passed")
    write(second[0], one="passed")
    result = Result(name="r", title="t", columns=[])
    add_row(result, second)
    compare(result, first, second)
    assert [check.ok for check in result.checks] == [True, False, False]


# --- the script ---------------------------------------------------------------------------------------


def script(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    bash = shutil.which("bash")
    assert bash is not None
    return subprocess.run(
        [bash, PROJECT / "build_scripts" / "upstream_tests.sh", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
        timeout=120,
        check=False,
    )


def test_help_shows_the_usage() -> None:
    shown = script("--help")
    assert shown.returncode == 0
    assert "build_scripts/upstream_tests.sh TREE" in shown.stdout
    assert "set -euo" not in shown.stdout


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    assert "--frobnicate" in script("--frobnicate").stderr
    assert script().stderr.startswith("torch-lms: expected TREE")
    assert "no test/test_torch.py" in script(tmp_path).stderr


def test_a_pytorch_without_the_patches_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_torch.py").write_text("")
    failed = script(tmp_path, "--check-only", PYTHON=sys.executable)
    assert failed.returncode == 1
    wanted = "without the fork's patches" if sys.version_info[:2] == (3, 10) else "expected Python 3.10"
    assert wanted in failed.stderr
