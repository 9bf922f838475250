"""Where masters are kept: on the host as a whole, in part, or on the device once there is room."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.chunk.plain import Chunked, Plain, same, train
from tests.chunk.test_chunked import ADAMW, OPTIMIZERS, make
from tests.unit.trainings import GPT_TRAINING, one_thread
from torch_lms.chunk import placement, streamed_updates
from torch_lms.chunk.layout import aligned
from torch_lms.chunk.placement import (
    Residence,
    UpdateChoice,
    UpdateRates,
    chosen_update,
    hosted_chunks,
    measured_rates,
)
from torch_lms.chunk.portions import Extent, groups_of, portions_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
NEEDED = {"parameters": 2 << 30, "masters": 4 << 30, "optimizer state": 8 << 30}


def extents_of(numels: list[int]) -> list[Extent]:
    found, offset = [], 0
    for number, numel in enumerate(numels):
        found.append(Extent(number=number, offset=offset, numel=numel))
        offset += aligned(numel)
    return found


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=20), st.integers(1, 8), st.booleans())
def test_portions_hold_every_element_once(numels: list[int], most: int, cut: bool) -> None:
    extents, most_numel = extents_of(numels), 128 * most
    portions = portions_of(extents, most_numel, cut=cut)
    assert all(one.begin + one.numel <= other.begin for one, other in pairwise(portions))
    held = sorted(
        (span.number, span.begin, span.begin + span.numel, portion.begin + span.offset)
        for portion in portions
        for span in portion.spans
    )
    for extent in extents:
        own = [one for one in held if one[0] == extent.number]
        assert own[0][1] == 0
        assert own[-1][2] == extent.numel
        assert all(one[2] == other[1] for one, other in pairwise(own))
        assert all(one[3] == extent.offset + one[1] for one in own)
    for portion in portions:
        assert portion.numel <= most_numel or (not cut and len(portion.spans) == 1)
        assert all(span.whole == (span.numel == numels[span.number]) for span in portion.spans)


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=20), st.integers(1, 8), st.booleans())
def test_every_tensor_is_in_one_group(numels: list[int], most: int, cut: bool) -> None:
    groups = groups_of(portions_of(extents_of(numels), 128 * most, cut=cut))
    assert sorted(number for group in groups for number in group) == list(range(len(numels)))


@pytest.mark.parametrize(
    ("host_bytes", "expected"),
    [(0, [False] * 4), (25, [False, False, True, True]), (1000, [True, False, True, True])],
)
def test_the_last_chunks_go_to_the_host_first(host_bytes: int, expected: list[bool]) -> None:
    assert hosted_chunks("stream", [10, 0, 10, 10], host_bytes) == expected
    assert hosted_chunks("device", [10, 0, 10, 10], host_bytes) == [False] * 4


def rates(**changed: float) -> UpdateRates:
    """Those of a GPU on PCIe and a processor that is slower than it."""
    known = {"out_bytes_per_us": 50e3, "in_bytes_per_us": 50e3, "device_ns": 0.01, "host_ns": 0.5}
    return UpdateRates(**{**known, **changed})


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "stream"),  # 12 bytes at 50 GB/s: 0.24 ns
        ({"host_ns": 0.1}, "host"),
        ({"host_ns": 0.2}, "stream"),  # the host rounds otherwise: a little faster is not worth it
        ({"host_ns": float("inf")}, "stream"),
        ({"host_ns": 0.1, "in_bytes_per_us": 50e4}, "host"),  # the slower way counts
        ({"host_ns": 0.1, "in_bytes_per_us": 50e4, "out_bytes_per_us": 50e4}, "stream"),
        ({"host_ns": 0.001, "out_bytes_per_us": 5.0}, "host"),
        ({"device_ns": float("inf")}, "host"),
        ({"device_ns": 0.4, "host_ns": 0.3}, "host"),
    ],
)
def test_what_has_no_room_is_updated_where_it_takes_least(changed: dict[str, float], expected: str) -> None:
    choice = chosen_update(NEEDED, CUDA, 10 << 30, lambda: rates(**changed), lambda: True)
    assert choice.update_on == expected
    assert choice.rates == rates(**changed)
    assert choice.beyond_bytes == 9 << 30
    assert not choice.given
    others = {where: ns for where, ns in choice.ns_each.items() if where != "host"}
    assert (choice.update_on == "host") == (choice.ns_each["host"] < 0.8 * min(others.values()))


@pytest.mark.parametrize(("device", "device_gib"), [(CPU, 1), (CUDA, 28)])
def test_nothing_is_measured_where_all_is_on_the_device(device: torch.device, device_gib: int) -> None:
    choice = chosen_update(NEEDED, device, device_gib << 30, *2 * [lambda: pytest.fail("expected nothing to try")])
    assert choice == UpdateChoice(update_on="device")


def test_rates_are_measured_without_a_change_of_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_TRIED_NUMEL", 1 << 10)
    parameter = torch.ones(1, requires_grad=True)
    optimizer = ADAMW([parameter])
    found = measured_rates(optimizer, CPU, torch.bfloat16, chunk_numel=1 << 20, device_bytes=1 << 30)
    assert all(0 < value < float("inf") for value in vars(found).values())
    assert not optimizer.state
    assert optimizer.param_groups[0]["params"] == [parameter]

    class Untriable(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            raise RuntimeError("as asked")

    untriable = Untriable([parameter])
    found = measured_rates(untriable, CPU, torch.bfloat16, chunk_numel=1 << 20, device_bytes=1 << 30)
    assert found.device_ns == found.host_ns == float("inf")


@one_thread()
@pytest.mark.parametrize("where", ["device", "host", "stream"])
def test_a_program_that_says_where_is_followed(where: str) -> None:
    given = Chunked(make(GPT_TRAINING), ADAMW, update_on=where).optimizer
    assert (given.update_choice.update_on, given.update_choice.given) == (where, True)
    assert given.data.update_on == where
    assert given.update_choice.rates is None


@one_thread()
def test_a_program_that_does_not_is_told_what_was_chosen() -> None:
    chosen = Chunked(make(GPT_TRAINING), ADAMW).optimizer
    assert chosen.update_choice == UpdateChoice(update_on="device")


@one_thread()
@pytest.mark.parametrize("optimizer", ["AdamW", "fused AdamW", "SGD with momentum", "Adafactor"])
def test_chunks_that_come_to_stay_change_no_bit(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_updates, "_PORTION_NUMEL", 1 << 11)
    optimize, steps = OPTIMIZERS[optimizer], 6
    expected = list(train(Plain(make(GPT_TRAINING), optimize), GPT_TRAINING.batch, steps))
    chunked = Chunked(make(GPT_TRAINING), optimize, update_on="stream", chunk_numel=1 << 15)
    data = chunked.optimizer.data
    before, each_bytes = data.allocated_bytes(), data.kept_bytes(0)
    for number, made in enumerate(train(chunked, GPT_TRAINING.batch, steps)):
        assert same(made, expected[number]), f"step {number}"
        if number == 2:
            each_bytes = data.kept_bytes(0)
            before = data.allocated_bytes()
            Residence(data, chunked.optimizer._masters, 0).fill(2 * each_bytes)
            assert data.on_host == [False, False] + [True] * (data.layout.chunks - 2)
    assert data.allocated_bytes() == before
    assert data.layout.chunks > 3


@one_thread()
def test_a_state_dict_has_what_lies_on_both_sides() -> None:
    plain = Plain(make(GPT_TRAINING), ADAMW)
    chunked = Chunked(make(GPT_TRAINING), ADAMW, update_on="stream", chunk_numel=1 << 15)
    for _ in zip(train(plain, GPT_TRAINING.batch, 2), train(chunked, GPT_TRAINING.batch, 2), strict=True):
        pass
    Residence(chunked.optimizer.data, chunked.optimizer._masters, 0).fill(2 * chunked.optimizer.data.kept_bytes(0))
    saved, states = chunked.model.state_dict(), chunked.optimizer.state_dict()["state"]
    for number, (name, _) in enumerate(plain.model.named_parameters()):
        assert torch.equal(saved[name], plain.masters[number])
        for key, value in plain.optimizer.state_dict()["state"][number].items():
            assert torch.equal(states[number][key], value)
    other = Chunked(make(GPT_TRAINING), ADAMW, update_on="stream", chunk_numel=1 << 14)
    other.model.load_state_dict(saved)
    other.optimizer.load_state_dict(copy.deepcopy(chunked.optimizer.state_dict()))
    for one, made in zip(train(chunked, GPT_TRAINING.batch, 2), train(other, GPT_TRAINING.batch, 2), strict=True):
        assert same(one, made)


@one_thread()
def test_few_buffers_do_where_the_device_has_no_room_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_updates, "_PORTION_NUMEL", 1 << 11)
    rooms: list[object] = []
    make_room = streamed_updates.StreamedUpdates._room

    def room(self: streamed_updates.StreamedUpdates, key: tuple[str, torch.dtype]) -> torch.Tensor:
        if key[0] == "" and len(self._buffers) >= 2:  # one more
            raise torch.OutOfMemoryError("as asked")
        rooms.append(key)
        return make_room(self, key)

    monkeypatch.setattr(streamed_updates.StreamedUpdates, "_room", room)
    expected = list(train(Plain(make(GPT_TRAINING), ADAMW), GPT_TRAINING.batch, 4))
    chunked = Chunked(make(GPT_TRAINING), ADAMW, update_on="stream", chunk_numel=1 << 15)
    for number, made in enumerate(train(chunked, GPT_TRAINING.batch, 4)):
        assert same(made, expected[number]), f"step {number}"
    assert rooms
