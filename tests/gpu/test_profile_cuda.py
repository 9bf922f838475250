"""Profiles on a GPU: of models that are there, that are brought there, and that do not fit."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from tests.profile.models import Branching, Convolutions, TiedLM
from torch_lms.profile import ProfileConfig, profile

CASES = [
    pytest.param(TiedLM, (torch.tensor([[1, 2, 3], [4, 5, 6]]),), id="operator"),
    pytest.param(Convolutions, (torch.ones(2, 3, 6, 6),), id="in_place"),
    pytest.param(Branching, (torch.ones(2, 4),), id="recorded"),
]


def quick(**options: Any) -> ProfileConfig:
    return ProfileConfig(**{"warmup_runs": 1, "timed_runs": 2, "links": False, "progress": False, **options})


@pytest.mark.parametrize(("build", "args"), CASES)
def test_a_model_is_brought_to_the_device_and_back(build: Any, args: Any) -> None:
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pointers = [tensor.data_ptr() for tensor in [*model.parameters(), *model.buffers()]]
    state = torch.cuda.get_rng_state()
    found = profile(model, *args, config=quick(device="cuda"))
    assert found.device.startswith("cuda:0 (")
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert pointers == [tensor.data_ptr() for tensor in [*model.parameters(), *model.buffers()]]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for node in found.nodes:
        if node.gradient_bytes and node.op.startswith("call"):
            assert node.forward_us > 0
    assert found.backward_us > 0


@pytest.mark.parametrize(("build", "args"), CASES[:2])
def test_piece_by_piece_keeps_what_the_whole_keeps(build: Any, args: Any) -> None:
    model = build()
    whole, pieces = (profile(model, *args, config=quick(device="cuda", pieces=pieces)) for pieces in (False, True))
    for one, other in zip(pieces.nodes, whole.nodes, strict=True):
        assert (one.name, one.output_bytes, one.saved) == (other.name, other.output_bytes, other.saved)
    assert next(model.parameters()).device.type == "cpu"
    assert pieces.forward_us > 0
    assert pieces.backward_us > 0


def test_links_go_both_ways() -> None:
    found = profile(TiedLM(), torch.tensor([[1, 2]]), config=quick(device="cuda", links=True))
    ways = {(link.source, link.target) for link in found.links}
    assert {("cpu", "cuda:0"), ("cuda:0", "cpu")} <= ways
    assert all(link.bytes_per_us > 0 and link.latency_us >= 0 for link in found.links)
    count = torch.cuda.device_count()
    assert len(ways) == len(found.links) == (count + 1) * count


def test_the_device_rests_between_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    rests_s: list[float] = []
    monkeypatch.setattr(time, "sleep", rests_s.append)
    profile(TiedLM(), torch.tensor([[1, 2]]), config=quick(device="cuda", rest_share=0.5))
    assert len(rests_s) == 3 + 2 + 3  # of nodes, of these with waits, and of whole steps
    assert min(rests_s) > 0


@pytest.mark.parametrize(("width", "depth", "busy"), [(8192, 8, True), (8, 500, False)])
def test_nodes_add_up_to_the_step(width: int, depth: int, busy: bool) -> None:
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
    found = profile(model, torch.ones(width, width), config=quick(device="cuda", timed_runs=5))
    assert found.forward_us + found.backward_us == pytest.approx(found.step_us)
    assert not busy or 0.8 < found.node_scale < 1.25  # nodes that Python is slower than may add up to anything
    assert any("waits for Python" in note for note in found.notes) != busy
