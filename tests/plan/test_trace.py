"""Traces as documents: what comes back, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.mutations import mutated
from tests.plan.random_traces import random_trace, traces
from tests.plan.traces import gpt_trace
from torch_lms.errors import PlanError
from torch_lms.plan import Host, Link, Trace, TraceOp

DOCUMENT: dict[str, Any] = {
    "format": "torch_lms.trace",
    "version": 4,
    "device": "cuda:0",
    "limit_bytes": None,
    "signature": "ab12",
    "cycle": {"kind": "training", "forwards": 1},
    "link": {"out_bytes_per_us": 55000.0, "in_bytes_per_us": 55000, "latency_us": 10.0, "share_beside": 0.875},
    "host": {"op_us": [5.0, 6.5, 7], "waits": [2], "pageout_us": 20.0, "pagein_us": 30.0, "recompute_us": 40.5},
    "ops": [
        {"name": "aten::addmm", "phase": "forward", "duration_us": 12.5, "other_bytes": 3, "key": 7, "inputs": [0],
         "outputs": [1]},
        {"name": "aten::gelu", "phase": "forward", "duration_us": 2, "other_bytes": 0, "key": 2**64 - 1, "inputs": [1],
         "outputs": []},
        {"name": "aten::gelu_backward", "phase": "backward", "duration_us": 4.0, "other_bytes": 0, "key": 0,
         "inputs": [1, 0], "outputs": []},
    ],
    "storages": [
        {
            "bytes": 1024, "recurring": True, "producer": None, "released": None, "uses": [0, 2], "writes": [2],
            "movable": True, "why_not_movable": "", "recompute": None, "why_not_recompute": "it has no op",
            "module": "up", "line": "model.py:3",
        },
        {
            "bytes": 4096, "recurring": False, "producer": 0, "released": 2, "uses": [1, 2], "writes": [],
            "movable": True, "why_not_movable": "", "why_not_recompute": "", "module": "up", "line": "model.py:3",
            "recompute": {"duration_us": 12.5, "inputs": [0], "outside_bytes": 7, "rewrites": [],
                          "working_bytes": 5},
        },
    ],
}  # fmt: skip


def changed(path: str, value: Any) -> str:
    document = json.loads(json.dumps(DOCUMENT))
    parent = document
    *steps, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    for step in steps:
        parent = parent[step]
    parent[last] = value
    return json.dumps(document)


def test_a_trace_is_read_as_written_down() -> None:
    trace = Trace.from_json(json.dumps(DOCUMENT))
    assert trace.link.in_bytes_per_us == 55000
    assert trace.storages[1].recompute is not None
    assert trace.storages[1].recompute.inputs == (0,)
    assert trace.storages[0].lasting
    assert not trace.storages[1].lasting
    assert (trace.plain_us, trace.op_of(1), trace.op_of(0)) == (18.5, "aten::addmm", "")
    assert json.loads(trace.to_json()) == DOCUMENT


@given(trace=traces())
@settings(max_examples=100, deadline=None)
def test_what_is_written_comes_back(trace: Trace) -> None:
    assert Trace.from_json(trace.to_json()) == trace


def test_older_traces_are_read_without_what_they_do_not_know() -> None:
    document, newest = json.loads(json.dumps(DOCUMENT)), Trace.from_json(json.dumps(DOCUMENT))
    recipe = newest.storages[1].recompute
    assert recipe is not None
    aged = replace(newest.storages[1], recompute=replace(recipe, working_bytes=0))
    for version, parent, name, unknown in (
        (3, document["link"], "share_beside", {"link": replace(newest.link, share_beside=1.0)}),
        (2, document["storages"][1]["recompute"], "working_bytes", {"storages": (newest.storages[0], aged)}),
        (1, document, "host", {"host": Host()}),
    ):
        with pytest.raises(PlanError, match=rf"expected no field .*{name} in version {version}, found one"):
            Trace.from_json(json.dumps({**document, "version": version}))
        del parent[name]
        newest = replace(newest, **unknown)
        assert Trace.from_json(json.dumps({**document, "version": version})) == newest
        with pytest.raises(PlanError, match=rf"expected a field .*{name}, found none"):
            Trace.from_json(json.dumps({**document, "version": version + 1}))


def test_a_trace_is_saved_and_loaded(tmp_path: Path) -> None:
    trace = gpt_trace(layers=1, width=64, tokens=32, vocabulary=100)
    trace.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json") == trace


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("format", "torch_lms.plan", "expected a document of format 'torch_lms.trace', found 'torch_lms.plan'"),
        ("version", 5, "expected torch_lms.trace of version 4, found version 5"),
        ("version", 0, "expected torch_lms.trace of version 4, found version 0"),
        ("version", 4.0, "expected torch_lms.trace of version 4, found version 4.0"),
        ("version", True, "expected torch_lms.trace of version 4, found version True"),
        ("version", 3, "expected no field torch_lms.trace.link.share_beside in version 3, found one"),
        ("host.op_us", [1.0], "expected host.op_us for 3 ops or for none, found 1"),
        ("host.op_us.1", -2, "at torch_lms.trace.host.op_us[1], found -2"),
        ("host.waits", [1, 3], r"expected ascending places from 0 to 2 at host.waits, found (1, 3)"),
        ("device", 3, "expected text at torch_lms.trace.device, found 3"),
        ("limit_bytes", -1, "at torch_lms.trace.limit_bytes, found -1"),
        ("cycle.kind", "dreaming", "expected one of training, evaluation, inference at torch_lms.trace.cycle.kind"),
        (
            "link.out_bytes_per_us",
            0,
            "expected a number above 0 and up to 2**53 at torch_lms.trace.link.out_b",
        ),
        ("link.share_beside", 1.5, "expected a number above 0 and up to 1.0 at torch_lms.trace.link.share_beside"),
        ("link.latency_us", float("inf"), "Infinity is no JSON number"),
        ("ops", [], "expected at least one op"),
        ("ops.0.duration_us", 1e300, "expected a number from 0 to 2**53 at torch_lms.trace.ops[0]"),
        ("storages.0.bytes", 10**400, "at torch_lms.trace.storages[0].bytes, found 1000"),
        ("ops.1.phase", "sideways", "at torch_lms.trace.ops[1].phase, found 'sideways'"),
        ("ops.0.duration_us", "fast", "at torch_lms.trace.ops[0].duration_us, found 'fast'"),
        ("ops.1.key", 2**64, "expected a whole number from 0 to 18446744073709551615 at torch_lms.trace.ops[1].key"),
        ("ops.2.inputs", [2], "expected storages from 0 to 1 at ops[2].inputs, found 2"),
        ("ops.0.outputs", [-1], "at torch_lms.trace.ops[0].outputs[0], found -1"),
        ("storages.0.recurring", 1, "expected true or false at torch_lms.trace.storages[0].recurring, found 1"),
        ("storages.1.uses", [2, 1], "in ascending order, found (2, 1)"),
        ("storages.0.uses", [2, 9], "expected places from 0 to 2 at storages[0].uses"),
        ("storages.1.uses.0", None, "at torch_lms.trace.storages[1].uses[0], found None"),
        ("storages.1.writes", [0], "expected writes among the uses"),
        ("storages.1.producer", 1, "expected uses after the producer 1, found 1"),
        ("storages.1.released", 1, "expected no use after released, 1, found one at 2"),
        ("storages.1.released", 3, "expected a place from 0 to 2 at storages[1].released, found 3"),
        ("storages.1.recompute.inputs", [5], "expected storages from 0 to 1 at storages[1].recompute.inputs, found 5"),
        ("storages.1.recompute.inputs", [1], "expected storages made before place 0"),
        ("storages.1.recompute.rewrites", [1], "expected the first of the writes () as recompute.rewrites, found (1,)"),
        ("storages.1.unknown", 1, "expected no field torch_lms.trace.storages[1].unknown in version 4, found one"),
        ("storages.1.recompute", [], "expected an object at torch_lms.trace.storages[1].recompute, found []"),
        (
            "storages.0.recompute",
            {"duration_us": 1, "inputs": [], "outside_bytes": 0, "rewrites": [], "working_bytes": 0},
            "without a producer",
        ),
    ],
)
def test_errors_name_the_field(path: str, value: Any, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        Trace.from_json(changed(path, value))
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "3", '"torch_lms.trace"', "[" * 100_000])
def test_text_that_is_no_trace_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="expected "):
        Trace.from_json(text)


@given(document=mutated(json.loads(random_trace(3).to_json())))
@settings(max_examples=400, deadline=None)
def test_a_changed_document_is_refused_or_is_another_trace(document: dict[str, Any]) -> None:
    message = ""
    try:
        trace = Trace.from_json(json.dumps(document))
    except PlanError as error:
        message = str(error)
    if message:
        assert message.startswith("expected ")
    else:
        assert Trace.from_json(trace.to_json()) == trace


def test_links_must_move_bytes() -> None:
    with pytest.raises(PlanError, match="measure the link again"):
        Link(out_bytes_per_us=0, in_bytes_per_us=1)
    with pytest.raises(PlanError, match="expected at least one op"):
        Trace(device="cpu", signature="", link=Link(out_bytes_per_us=1, in_bytes_per_us=1), ops=(), storages=())
    op = TraceOp(name="a", phase="forward", duration_us=1)
    assert Trace(
        device="cpu", signature="", link=Link(out_bytes_per_us=1, in_bytes_per_us=1), ops=(op,), storages=()
    ).by_place.used == [[]]


@given(seed=st.integers(0, 500))
@settings(max_examples=50, deadline=None)
def test_places_list_what_storages_say(seed: int) -> None:
    trace = random_trace(seed)
    index = trace.by_place
    for number, storage in enumerate(trace.storages):
        assert tuple(place for place, used in enumerate(index.used) if number in used) == storage.uses
        assert tuple(place for place, written in enumerate(index.written) if number in written) == storage.writes
        assert [place for place, made in enumerate(index.made) if number in made] == (
            [] if storage.producer is None else [storage.producer]
        )
