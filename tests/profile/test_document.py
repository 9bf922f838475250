from __future__ import annotations

import copy
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torch_lms.errors import ProfileError
from torch_lms.profile import LinkProfile, NodeProfile, Profile, ProfileConfig, profile
from torch_lms.profile.document import VERSION
from torch_lms.profile.table import profile_table

LINEAR = NodeProfile(
    name="linear",
    op="call_function",
    target="torch.nn.functional.linear",
    inputs=("x",),
    module="head",
    forward_us=1.25,
    backward_us=2.5,
    output_bytes=64,
    gradient_bytes=64,
    parameters=("head.weight",),
    saved=("x", "linear"),
    output_storages=("linear",),
    saved_parameters=("head.weight",),
    not_before=("again",),
    writes=("x",),
)
INPUT = NodeProfile(name="x", op="placeholder", target="x", output_bytes=32, output_storages=("x",))
PROFILE = Profile(
    model="Model",
    level="operator",
    device="cpu",
    torch_version="2.13",
    warmup_runs=5,
    timed_runs=50,
    timed=True,
    nodes=(INPUT, LINEAR, replace(LINEAR, name="again", inputs=("linear",), saved=("linear",))),
    notes=("a note",),
    parameter_bytes={"head.weight": 128},
    tied={"tail.weight": "head.weight"},
    trainable=frozenset({"head.weight"}),
    storage_bytes={"x": 32, "linear": 64},
    optimizer_bytes={"head.weight": 256},
    step_us=8.0,
    links=(LinkProfile(source="cpu", target="cuda:0", bytes_per_us=55e3, latency_us=7.5),),
)


@pytest.mark.parametrize("profile", [PROFILE, replace(PROFILE, optimizer_bytes=None, links=(), timed=False)])
def test_json_comes_back_equal(profile: Profile) -> None:
    assert Profile.from_json(profile.to_json()) == profile


def test_file_comes_back_equal(tmp_path: object) -> None:
    path = f"{tmp_path}/profile.json"
    PROFILE.save(path)
    assert Profile.load(path) == PROFILE


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no json", "not"),
        ("[]", f"version {VERSION}"),
        (json.dumps({"version": VERSION - 1}), f"found {VERSION - 1}"),
        (json.dumps({"version": VERSION, "colour": "blue"}), "colour"),
        (
            json.dumps({**json.loads(PROFILE.to_json()), "nodes": [{"shape": 1}]}),
            r"no field profile\.nodes\[0\]\.shape",
        ),
        (PROFILE.to_json().replace('"step_us": 8.0', '"step_us": NaN'), "NaN is no JSON number"),
        (
            PROFILE.to_json().replace('"step_us": 8.0', '"step_us": "8"'),
            r"a number from 0 to 2\*\*53 at profile\.step_us",
        ),
        (PROFILE.to_json().replace('"step_us": 8.0,', ""), r"a field profile\.step_us, found none"),
        (json.dumps({**json.loads(PROFILE.to_json()), "trainable": "all"}), r"a list at profile\.trainable"),
        (json.dumps({**json.loads(PROFILE.to_json()), "storage_bytes": {"x": None}}), r"profile\.storage_bytes\.x"),
        (json.dumps({**json.loads(PROFILE.to_json()), "storage_bytes": []}), r"an object at profile\.storage_bytes"),
    ],
)
def test_what_is_no_profile_is_refused(text: str, words: str) -> None:
    with pytest.raises(ProfileError, match=words):
        Profile.from_json(text)


def numbers_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        yield from numbers_in(item, (*path, name))
    if isinstance(value, (int, float)):
        yield path


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    """A document of a real profile, with numbers in all places."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
    found = profile(
        model, torch.randn(3, 4), optimizer=torch.optim.Adam, config=ProfileConfig(warmup_runs=1, timed_runs=1)
    )
    links = (LinkProfile(source="cpu", target="cuda:0", bytes_per_us=55e3, latency_us=7.5),)
    made: dict[str, Any] = json.loads(replace(found, links=links).to_json())
    assert Profile.from_json(json.dumps(made)) == replace(found, links=links)
    return made


@given(data=st.data())
@settings(deadline=None, derandomize=True, max_examples=200)
def test_each_number_that_is_damaged_is_refused(measured: dict[str, Any], data: st.DataObject) -> None:
    changed = copy.deepcopy(measured)
    path = data.draw(st.sampled_from(list(numbers_in(changed))))
    holder: Any = changed
    for step in path[:-1]:
        holder = holder[step]
    wrong = st.sampled_from([10**20, 1e20, -0.5, float("nan"), float("inf"), "1", []])
    wrong |= st.integers(min_value=2**53 + 1) | st.integers(max_value=-1)
    holder[path[-1]] = data.draw(wrong if isinstance(holder[path[-1]], bool) else wrong | st.booleans())
    with pytest.raises(ProfileError, match="expected"):
        Profile.from_json(json.dumps(changed))


def test_a_storage_that_two_nodes_keep_counts_once() -> None:
    assert PROFILE.saved_bytes == 32 + 64
    assert PROFILE.forward_us == 2.5
    assert PROFILE.backward_us == 5.0


def test_table_shows_nodes_sums_links_and_notes() -> None:
    console = pytest.importorskip("rich.console").Console(width=160, record=True, file=io.StringIO())
    console.print(profile_table(PROFILE))
    text = console.export_text()
    for words in ("linear", "head", "128 B", "whole step 8 us", "cpu to cuda:0: 55.0 GB/s", "note: a note"):
        assert words in text


def test_table_can_show_the_slowest_nodes_only() -> None:
    console = pytest.importorskip("rich.console").Console(width=160, record=True, file=io.StringIO())
    console.print(
        profile_table(replace(PROFILE, nodes=(INPUT, LINEAR, replace(LINEAR, name="slow", forward_us=99.0))), 1)
    )
    text = console.export_text()
    assert "slow" in text
    assert "again" not in text
