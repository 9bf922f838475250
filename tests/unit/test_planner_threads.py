"""Where the system gives the planner no thread, or ends its process."""

from __future__ import annotations

import sys
import threading
import warnings
from pathlib import Path

import pytest

from tests.plan.test_planner_process import PEAK_BYTES, plans_of, request
from torch_lms.errors import PlanError
from torch_lms.plan.trace import Link
from torch_lms.swap import planning

RECORDING = {"device": "cpu", "ops": [], "storages": []}


def no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("followed", ["", "a#1"])
def test_a_planner_without_a_thread_is_told_of_once_and_can_be_ended(
    followed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = planning._Kept({"document": b"", "signature": "a", "device": "cpu", "step_us": 1.0}, b"")
    monkeypatch.setattr(planning, "_wishes", planning.Wishes(limits={"cpu": 1}))
    monkeypatch.setattr(planning, "_planner", None)
    monkeypatch.setitem(planning._plans, "a#1", kept)
    monkeypatch.setattr(planning.core, "take_recording", lambda: None if followed else RECORDING)
    monkeypatch.setattr(planning.core, "take_times", lambda: (followed, {"times_us": []}))
    monkeypatch.setattr(planning, "measure_link", lambda _: Link(out_bytes_per_us=1.0, in_bytes_per_us=1.0))
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        planning.start()
    assert ["can't start new thread" in str(one.message) for one in said] == ([] if followed else [True])
    assert not planning.is_planning()
    planning.end()
    assert planning.current_plan() is None


@pytest.mark.parametrize("times", [1, 2])
def test_a_planner_that_others_kill_is_begun_anew_once(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recording is at hand still; the core records no other while it waits for a plan."""
    program, begun = tmp_path / "planner", tmp_path / "begun"
    program.write_text(
        f"#!{sys.executable}\nimport os, sys\nopen({str(begun)!r}, 'a').write('.')\n"
        f"if os.path.getsize({str(begun)!r}) <= {times}:\n    os.kill(os.getpid(), 9)\n"
        f"os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    wishes = planning.Wishes(limits={"cuda:0": PEAK_BYTES // 2})
    monkeypatch.setattr(planning, "_wishes", wishes)
    monkeypatch.setattr(planning, "_planner", threading.current_thread())
    if times == 1:
        assert plans_of(planning._answers(request(PEAK_BYTES // 2), wishes))
    else:
        with pytest.raises(PlanError, match="ended by SIGKILL"):
            list(planning._answers(request(PEAK_BYTES // 2), wishes))
    assert begun.read_text() == ".."
