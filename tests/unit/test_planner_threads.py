"""Where the system gives the planner no thread."""

from __future__ import annotations

import threading
import warnings

import pytest

from torch_lms.plan.trace import Link
from torch_lms.swap import planning

RECORDING = {"device": "cpu", "ops": [], "storages": []}


def no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("followed", ["", "a#1"])
def test_a_planner_without_a_thread_is_told_of_once_and_can_be_ended(
    followed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = planning._Kept({"document": b"", "signature": "a", "device": "cpu"}, b"")
    monkeypatch.setattr(planning, "_wishes", planning.Wishes(limits={"cpu": 1}))
    monkeypatch.setattr(planning, "_planner", None)
    monkeypatch.setattr(planning, "_has_warned", False)
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
