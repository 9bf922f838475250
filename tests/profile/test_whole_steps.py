"""Times of nodes that add up to those of whole steps, with and without waits for Python."""

from __future__ import annotations

import pytest

from torch_lms.profile.document import NodeProfile, Profile
from torch_lms.profile.steps import StepTime
from torch_lms.profile.whole_steps import as_in_steps


def two_nodes() -> Profile:
    """Two nodes that take 6 us by themselves, and an input."""
    timed = [
        NodeProfile(
            name=name, op="call_module", target=name, forward_us=1.0, backward_us=2.0, input_backward_us=0.5,
            weight_backward_us=1.5,
        )
        for name in "ab"
    ]  # fmt: skip
    return Profile(
        model="M", level="operator", device="cuda:0", torch_version="", warmup_runs=0, timed_runs=2, timed=True,
        nodes=(NodeProfile(name="x", op="placeholder", target="x"), *timed),
    )  # fmt: skip


def times_of(found: Profile) -> list[tuple[float, float, float | None, float | None]]:
    return [
        (node.forward_us, node.backward_us, node.input_backward_us, node.weight_backward_us) for node in found.nodes[1:]
    ]


@pytest.mark.parametrize("forward_us", [1.5, 4.0])
def test_a_device_that_never_waits_takes_all_times_longer_by_the_same_part(forward_us: float) -> None:
    unhurried = {"a": 1.02, "b": 1.0, "x": 9.0}, {"a": 2.1, "b": 1.9}
    found = as_in_steps(two_nodes(), unhurried, [StepTime(forward_us - 1, 5.0), StepTime(forward_us + 1, 7.0)])
    assert times_of(found) == [(forward_us / 2, 3.0, 0.75, 2.25)] * 2
    assert found.node_scale == (forward_us + 6) / 6
    assert found.nodes[0].forward_us == 0


def test_what_the_device_waits_belongs_to_the_nodes_in_which_it_does() -> None:
    unhurried = {"a": 5.0, "b": 1.0, "x": 9.0}, {"a": 2.0, "b": 4.0}
    found = as_in_steps(two_nodes(), unhurried, [StepTime(3.0, 5.0)])
    assert times_of(found) == [(2.0, 2.0, 0.5, 1.5), (1.0, 3.0, 0.75, 2.25)]


def test_waits_that_no_step_has_are_left_out() -> None:
    unhurried = {"a": 5.0, "b": 1.0}, {"a": 9.0, "b": 2.0}
    found = as_in_steps(two_nodes(), unhurried, [StepTime(2.0, 4.0)])
    assert times_of(found) == times_of(two_nodes())
    assert found.node_scale == 1


def test_without_a_backward_there_is_none_to_share() -> None:
    forward_only = Profile(
        model="M", level="operator", device="cuda:0", torch_version="", warmup_runs=0, timed_runs=1, timed=True,
        nodes=(NodeProfile(name="a", op="call_module", target="a", forward_us=1.0),),
    )  # fmt: skip
    assert times_of(as_in_steps(forward_only, ({}, {}), [StepTime(2.0, 0.1)])) == []
    assert as_in_steps(forward_only, ({}, {}), [StepTime(2.0, 0.1)]).nodes[0].forward_us == 2.0
