"""Times of nodes that add up to those of whole steps, with and without waits for Python."""

from __future__ import annotations

import pytest

from torch_lms.profile.document import NodeProfile, Profile
from torch_lms.profile.steps import StepTime, typical_step
from torch_lms.profile.timing import NodeTimes
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


def unhurried(*device_us: float, host_us: tuple[float, float] = (0.0, 0.0)) -> NodeTimes:
    return NodeTimes(dict(zip("ab", device_us, strict=True)), dict(zip("ab", host_us, strict=True)))


@pytest.mark.parametrize("forward_us", [1.5, 4.0])
def test_a_device_that_never_waits_takes_all_times_longer_by_the_same_part(forward_us: float) -> None:
    """However long nodes take where Python is slowed down by marks."""
    steps = [StepTime(forward_us - 1, 5.0, 1.0, 2.0), StepTime(forward_us + 1, 7.0, 1.0, 2.0)]
    found = as_in_steps(two_nodes(), (unhurried(9.0, 1.0), unhurried(2.1, 1.9)), typical_step(steps))
    assert times_of(found) == [(forward_us / 2, 3.0, 0.75, 2.25)] * 2
    assert found.node_scale == (forward_us + 6) / 6
    assert found.nodes[0].forward_us == 0
    assert not found.notes


def test_what_the_device_waits_belongs_to_the_nodes_in_which_it_does() -> None:
    found = as_in_steps(two_nodes(), (unhurried(5.0, 1.0), unhurried(2.0, 4.0)), StepTime(3.0, 5.0))
    assert times_of(found) == [(2.0, 2.0, 0.5, 1.5), (1.0, 3.0, 0.75, 2.25)]
    assert any("waits for Python" in note for note in found.notes)


def test_what_nodes_take_too_long_belongs_to_those_that_keep_python_busy() -> None:
    slow = unhurried(1.0, 1.0, host_us=(9.0, 0.0)), unhurried(2.0, 2.0, host_us=(0.5, 0.5))
    found = as_in_steps(two_nodes(), slow, StepTime(1.5, 3.5))
    assert any("waits for Python" in note for note in found.notes)
    assert times_of(found) == [(0.5, 1.75, 0.4375, 1.3125), (1.0, 1.75, 0.4375, 1.3125)]


def test_where_python_takes_too_little_all_times_are_less() -> None:
    slow = unhurried(1.0, 1.0, host_us=(0.5, 0.0)), unhurried(2.0, 2.0)
    found = as_in_steps(two_nodes(), slow, StepTime(1.2, 4.0))
    assert times_of(found) == [(0.6, 2.0, 0.5, 1.5)] * 2


def test_without_a_backward_there_is_none_to_share() -> None:
    forward_only = Profile(
        model="M", level="operator", device="cuda:0", torch_version="", warmup_runs=0, timed_runs=1, timed=True,
        nodes=(NodeProfile(name="a", op="call_module", target="a", forward_us=1.0),),
    )  # fmt: skip
    nothing = NodeTimes({}, {})
    found = as_in_steps(forward_only, (nothing, nothing), StepTime(2.0, 0.1, 1.0, 0.0))
    assert (found.nodes[0].forward_us, found.nodes[0].backward_us) == (2.0, 0.0)


def test_a_typical_step_has_the_median_of_each_figure() -> None:
    steps = [StepTime(1.0, 9.0, 0.0, 4.0), StepTime(2.0, 3.0, 1.0, 5.0), StepTime(4.0, 8.0, 2.0, 6.0)]
    assert typical_step(steps) == StepTime(2.0, 8.0, 1.0, 5.0)
    assert typical_step(steps).step_us == 10.0
    assert typical_step([]) == StepTime(0.0, 0.0)
