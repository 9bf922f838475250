"""No partition beats the bound of the largest stage cost, and where the search has time it is what the best one has."""

from __future__ import annotations

import itertools
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.partition.graphs import chain, unet
from tests.partition.random_graphs import make_graph, measured
from tests.unit.error_messages import raises_saying
from torch_lms.errors import PartitionError
from torch_lms.partition import CostGraph, CostModel, CostNode, DeviceSpec, LinkSpec, PartitionProblem, bottleneck_bound
from torch_lms.plan import linear

ROUNDING = 1 + 1e-9
NEARLY = 1 - 2e-4  # the solver ends within 1e-4
LINKS = (
    LinkSpec(),
    LinkSpec(bytes_per_us=10.0),
    LinkSpec(bytes_per_us=100.0, latency_us=3.0),
    LinkSpec(latency_us=5.0),
)
SEEDS = range(30)
bound = bottleneck_bound.bottleneck_bound
stage_costs_us = bottleneck_bound.stage_costs_us


def devices(count: int, speed: float = 1.0) -> tuple[DeviceSpec, ...]:
    return tuple(DeviceSpec(name=f"d{index}", speed=speed) for index in range(count))


def problem_of(graph: CostGraph, stages: int, link: LinkSpec, speed: float = 1.0) -> PartitionProblem:
    model = CostModel(microbatches=stages)
    return PartitionProblem(graph=graph, devices=devices(stages, speed), links=link, cost_model=model)


@cache
def random_problem(seed: int) -> PartitionProblem:
    graph = make_graph(seed, 5 + seed % 2)
    return problem_of(graph, 2 + seed % 3, LINKS[seed % len(LINKS)], (1.0, 2.0)[seed % 5 == 0])


@cache
def least_us(seed: int) -> float:
    """The least largest stage cost of all partitions of a random problem, in runs of one order or not."""
    problem = random_problem(seed)
    costs = []
    for placed in itertools.product(range(problem.stages), repeat=len(problem.units)):
        ordered = all(placed[one] <= placed[unit] for unit, own in enumerate(problem.units.inputs) for one in own)
        if ordered and len(set(placed)) == problem.stages:
            costs.append(max(stage_costs_us(measured(problem, np.array(placed)))))
    return min(costs)


def programs_only(monkeypatch: pytest.MonkeyPatch, count: int, problem: PartitionProblem) -> float:
    """What is proven if the time is over after so many programs."""
    seconds = itertools.count()
    monkeypatch.setattr(bottleneck_bound, "time", SimpleNamespace(monotonic=lambda: next(seconds) * 100.0))
    return bound(problem, seconds=count * 100.0 + 50.0).lower_us


def test_a_stage_pays_for_all_that_crosses_its_borders_both_ways() -> None:
    """The first value goes through the second stage, and the second stage's result through the third."""
    nodes = (
        CostNode(name="x", kind="placeholder", output_bytes=5000),
        CostNode(name="a", forward_us=10.0, output_bytes=30, gradient_bytes=20, inputs=("x",)),
        CostNode(name="b", forward_us=20.0, output_bytes=4, inputs=("a",)),
        CostNode(name="c", forward_us=40.0, output_bytes=7, inputs=("a",)),
        CostNode(name="output", kind="output", inputs=("b", "c")),
    )
    problem = problem_of(CostGraph(nodes=nodes), 3, LinkSpec(bytes_per_us=10.0, latency_us=1.0))
    first, second = 2 + 5.0, 2 + 5.4
    costs = (10 + first, 20 + first + second, 40 + second)
    assert stage_costs_us(measured(problem, np.array([0, 1, 2]))) == pytest.approx(costs)
    # With b and c the other way round the longest stage has both borders.
    assert bound(problem).lower_us == pytest.approx(40 + second, rel=1e-3)


@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_the_bound_is_the_least_cost_of_all_partitions_of_random_graphs(
    monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    """Also where the partition that the search begins with costs more."""
    known_us = bottleneck_bound._CostedUnits.contiguous_us
    monkeypatch.setattr(
        bottleneck_bound._CostedUnits, "contiguous_us", lambda self, orders: factor * known_us(self, orders)
    )
    for seed in SEEDS:
        problem, least = random_problem(seed), least_us(seed)
        found = bound(problem)
        assert least * NEARLY <= found.lower_us <= least * ROUNDING, seed
        assert problem.lower_bound_us <= found.lower_us * ROUNDING
        assert least * factor <= found.upper_us * ROUNDING


@pytest.mark.parametrize("programs", [0, 2, 4, 6, 8, 10, 12])
def test_whatever_is_proven_when_the_time_is_over_holds(monkeypatch: pytest.MonkeyPatch, programs: int) -> None:
    for seed in SEEDS[::5]:
        problem = random_problem(seed)
        proven = programs_only(monkeypatch, programs, problem)
        assert problem.lower_bound_us / ROUNDING <= proven <= least_us(seed) * ROUNDING, seed


@pytest.mark.parametrize(("programs", "least"), [(9, 20.0), (10, 70 / 3), (11, 24.0)])
def test_superblocks_pay_for_their_outer_borders_once_and_for_inner_ones_twice(
    monkeypatch: pytest.MonkeyPatch, programs: int, least: float
) -> None:
    """Eight nodes of 10 us, two for each of four stages, and 2 us at each border.

    After nine programs, for the least costs of three borders, stands the simple bound. The first stage has 22; what is
    behind it has 60 for its work, 2 for the border before it and 8 for two inner ones, in three stages.
    """
    problem = problem_of(chain([10.0] * 8, output_bytes=10), 4, LinkSpec(bytes_per_us=10.0))
    assert programs_only(monkeypatch, programs, problem) == pytest.approx(least, rel=1e-5)


def test_too_little_time_for_any_program_leaves_the_simple_bound() -> None:
    problem = problem_of(unet(), 8, LinkSpec(bytes_per_us=2e5, latency_us=5.0))
    assert bound(problem, seconds=0.0).lower_us == pytest.approx(problem.lower_bound_us)
    hurried = bound(problem, seconds=0.05)
    assert problem.lower_bound_us <= hurried.lower_us * ROUNDING
    assert hurried.lower_us <= hurried.upper_us


@pytest.mark.parametrize(("stages", "least"), [(1, 60.0), (2, 30.0 + 2), (3, 20.0 + 4), (6, 10.0 + 4)])
def test_an_even_chain_costs_an_even_share_and_its_transfers(stages: int, least: float) -> None:
    problem = problem_of(chain([10.0] * 6, output_bytes=10), stages, LinkSpec(bytes_per_us=10.0))
    # The last value is the model's result and stays in the last stage.
    assert bound(problem).lower_us == pytest.approx(least, rel=1e-5)


def test_a_graph_that_takes_no_time_has_a_bound_of_nothing() -> None:
    assert bound(problem_of(chain([0.0] * 3, output_bytes=0), 2, LinkSpec())).lower_us == 0.0


@pytest.mark.parametrize(
    ("changes", "found", "do"),
    [
        ({"devices": (*devices(1), DeviceSpec(name="fast", speed=2.0))}, "1.0, 2.0", "lower_bound_us"),
        ({"devices": devices(1) * 2}, "found 1", "name each device once"),
        (
            {"devices": devices(2), "links": {("d0", "d1"): LINKS[0], ("d1", "d0"): LINKS[1]}},
            "2 different ones",
            "give one LinkSpec",
        ),
    ],
)
def test_devices_and_links_that_differ_are_refused(changes: dict[str, Any], found: str, do: str) -> None:
    problem = PartitionProblem(graph=chain([1.0] * 3), **changes)
    with raises_saying(PartitionError, found=found, do=do):
        bound(problem)


def test_without_scipy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "find_spec", lambda name: None)
    with raises_saying(PartitionError, found="none", do="pip install torch-lms[plan]"):
        bound(problem_of(chain([1.0] * 3), 2, LinkSpec()))


def test_links_by_pairs_that_are_equal_are_one_link() -> None:
    link = LinkSpec(bytes_per_us=10.0)
    pairs = {("d0", "d1"): link, ("d1", "d2"): link}
    by_pairs = PartitionProblem(graph=chain([10.0] * 6, output_bytes=10), devices=devices(3), links=pairs)
    assert bound(by_pairs).lower_us == pytest.approx(24.0, rel=1e-5)
