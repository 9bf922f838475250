"""State dicts of optimizers: what is loaded is all that is kept, and what cannot be is refused first."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.chunk.plain import Chunked, Plain, same, train
from tests.unit.trainings import one_thread, vector_batch
from torch_lms.errors import ChunkError

ADAMW = partial(torch.optim.AdamW, lr=1e-2)


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, 16), nn.GELU(), nn.Linear(16, 512))


@one_thread()
@pytest.mark.parametrize("optimize", [ADAMW, partial(torch.optim.SGD, lr=1e-2, momentum=0.9)], ids=["AdamW", "SGD"])
@pytest.mark.parametrize("update_on", ["device", "host", "stream"])
def test_what_a_loaded_state_dict_lacks_is_not_kept(update_on: str, optimize: Callable[..., Any]) -> None:
    fresh = optimize(make().parameters()).state_dict()
    plain, chunked = Plain(make(), optimize), Chunked(make(), optimize, update_on=update_on)
    for load in (False, True):
        if load:
            plain.optimizer.load_state_dict(fresh)
            chunked.optimizer.load_state_dict(fresh)
        for expected, made in zip(train(plain, vector_batch, 2), train(chunked, vector_batch, 2), strict=True):
            assert same(expected, made)


def with_state(state_dict: dict[str, Any], value: Any) -> dict[str, Any]:
    found = copy.deepcopy(state_dict)
    found["state"][0]["exp_avg"] = value
    return found


WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a number": (lambda _: 5, "found int; pass what"),
    "nothing": (lambda _: {}, "found dict with nothing; pass what"),
    "no groups": (lambda good: {"state": good["state"]}, "found dict with 'state'; pass what"),
    "a group without parameters": (lambda _: {"state": {}, "param_groups": [{}]}, "dicts that have 'params'"),
    "a state that is none": (lambda good: {**good, "state": {0: 5}}, "state of parameter 0 to be a dict, found int"),
    "another tensor's": (lambda good: with_state(good, torch.zeros(3)), r"of shape \(16, 512\), found \(3,\)"),
    "a word": (lambda good: with_state(good, "none"), r"of shape \(16, 512\), found 'none'"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_state_dict_is_refused_before_anything_changes(wrong: str) -> None:
    chunked = Chunked(make(), ADAMW)
    list(train(chunked, vector_batch, 1))
    before = copy.deepcopy(chunked.optimizer.state_dict())
    spoil, message = WRONG[wrong]
    with pytest.raises(ChunkError, match=message):
        chunked.optimizer.load_state_dict(spoil(before))
    after = chunked.optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for number, state in before["state"].items():
        assert all(torch.equal(after["state"][number][key], value) for key, value in state.items())
