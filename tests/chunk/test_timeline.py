"""When updates run, and how much of them hides behind a backward."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch

from tests.chunk.plain import Chunked, loss_of, same, train
from tests.chunk.test_chunked import ADAMW, make
from tests.unit.trainings import GPT_TRAINING, one_thread
from torch_lms.chunk import host_updates
from torch_lms.chunk.timeline import Span, Timeline

CPU = torch.device("cpu")
PATIENCE_S = 60
LANES = {
    "host": {"gradients out", "update", "parameters in", "backward"},
    "stream": {"masters in", "update", "masters out", "backward"},
}


def timeline_of(*spans: tuple[str, float, float, bool]) -> Timeline:
    made = Timeline(CPU)
    made.spans = tuple(Span(lane=lane, begin_us=begin, end_us=end, beside=beside) for lane, begin, end, beside in spans)
    return made


@pytest.mark.parametrize(
    ("spans", "update_us", "share"),
    [
        ([("backward", 0, 10, True)], 0, None),
        ([("backward", 0, 10, True), ("update", 2, 6, True)], 4, 1.0),
        ([("backward", 0, 10, True), ("update", 8, 12, True)], 4, 0.5),
        ([("backward", 0, 10, True), ("update", 11, 12, True)], 1, 0.0),
        ([("backward", 0, 10, True), ("update", 2, 6, False)], 4, 0.0),
        ([("backward", 0, 10, True), ("in", 2, 6, True), ("update", 4, 8, True), ("out", 7, 14, True)], 12, 8 / 12),
        ([("backward", 0, 10, True), ("in", 0, 9, True), ("out", 2, 3, True), ("in", 19, 20, True)], 10, 0.9),
        ([("update", 2, 6, True)], 4, 0.0),
    ],
)
def test_what_lies_before_the_last_gradient_is_hidden(
    spans: list[tuple[str, float, float, bool]], update_us: float, share: float | None
) -> None:
    found = timeline_of(*spans)
    assert found.update_us == pytest.approx(update_us)
    assert found.hidden_share == (share if share is None else pytest.approx(share))


def test_a_trace_has_a_row_for_each_lane(tmp_path: Path) -> None:
    timeline_of(("in", 1, 2, True), ("update", 2, 4, True), ("in", 3, 5, True)).write_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = [(rows[event["tid"]], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    assert spans == [("in", 1, 1), ("update", 2, 2), ("in", 3, 2)]


def chunked(where: str, *, in_backward: bool) -> Chunked:
    return Chunked(make(GPT_TRAINING), ADAMW, update_on=where, step_in_backward=in_backward, chunk_numel=1 << 14)


def recorded_step(training: Chunked) -> Timeline:
    training.zero_grad()
    loss = loss_of(training.model, GPT_TRAINING.batch(0))
    with training.optimizer.record_updates() as timeline:
        loss.backward()
        training.step()
    return timeline


@one_thread()
@pytest.mark.parametrize("where", ["host", "stream"])
def test_updates_after_a_backward_hide_behind_nothing(where: str) -> None:
    found = recorded_step(chunked(where, in_backward=False))
    assert {span.lane for span in found.spans} == LANES[where]
    assert found.update_us > 0
    assert found.hidden_share == 0


@one_thread()
def test_updates_beside_a_backward_hide_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last gradient comes once something has been updated."""
    training, updated = chunked("host", in_backward=True), threading.Event()
    update = host_updates.HostUpdates._update

    def note(*given: object) -> object:
        try:
            return update(*given)  # type: ignore[arg-type]
        finally:
            updated.set()

    monkeypatch.setattr(host_updates.HostUpdates, "_update", note)
    first = next(iter(training.parameters))

    def wait(_: torch.Tensor) -> None:
        assert updated.wait(PATIENCE_S)

    first.register_hook(wait)
    share = recorded_step(training).hidden_share
    assert share is not None
    assert 0 < share <= 1


@one_thread()
def test_what_the_processor_does_itself_in_a_backward_does_not_hide() -> None:
    found = recorded_step(chunked("stream", in_backward=True))
    assert {span.lane for span in found.spans} == LANES["stream"]
    assert found.hidden_share == 0


@one_thread()
def test_updates_of_masters_on_the_device_are_not_recorded() -> None:
    found = recorded_step(chunked("device", in_backward=True))
    assert [span.lane for span in found.spans] == ["backward"]
    assert found.hidden_share is None


@one_thread()
@pytest.mark.parametrize("where", ["host", "stream"])
def test_a_recording_changes_nothing_and_ends(where: str) -> None:
    expected = list(train(chunked(where, in_backward=False), GPT_TRAINING.batch, 3))
    training = chunked(where, in_backward=False)
    with training.optimizer.record_updates() as timeline:
        made = list(train(training, GPT_TRAINING.batch, 2))
    count = len(timeline.spans)
    assert count
    torch.manual_seed(2)
    training.zero_grad()
    loss = loss_of(training.model, GPT_TRAINING.batch(2))
    loss.backward()
    training.step()
    assert all(map(same, made, expected))
    assert torch.equal(loss.detach(), expected[2][0])
    assert len(timeline._marks) + 1 == count
    assert not training.parameters[0]._backward_hooks
