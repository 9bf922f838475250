"""What every algorithm must keep to, on random graphs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.partition.graphs import chain
from tests.partition.random_graphs import make_graph, measured, problems
from torch_lms.errors import PartitionError
from torch_lms.partition import (
    CostModel,
    DeviceSpec,
    LinkSpec,
    Partition,
    PartitionProblem,
    algorithm_names,
    find_algorithm,
    partition,
)
from torch_lms.partition.algorithms.fiduccia_mattheyses import refine
from torch_lms.partition.orders import candidate_orders

quick = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
NAMES = [*algorithm_names(), "type:blocks|call"]


def assert_valid(problem: PartitionProblem, made: Partition) -> None:
    assert set(made.stage_of) == {node.name for node in problem.graph.nodes}
    for node in problem.graph.nodes:
        for name in node.inputs:
            assert made.stage_of[name] <= made.stage_of[node.name]
            assert made.stage_of[name] == made.stage_of[node.name] or not node.element
    assert {made.stage_of[node.name] for node in problem.units.nodes} == set(range(problem.stages))


@pytest.mark.parametrize("name", NAMES)
@quick
@given(problem=problems())
def test_a_partition_places_each_node_once_and_never_goes_back(name: str, problem: PartitionProblem) -> None:
    made = find_algorithm(name).partition(problem)
    assert_valid(problem, made)
    assert made.bottleneck_us >= made.lower_bound_us * (1 - 1e-9)
    assert made.reason


@quick
@given(problem=problems())
def test_auto_is_never_worse_than_any_other_algorithm(problem: PartitionProblem) -> None:
    best = find_algorithm("auto").partition(problem)
    for name in NAMES:
        assert best.step_us <= find_algorithm(name).partition(problem).step_us * (1 + 1e-9)


@quick
@given(problem=problems(capped=True))
def test_refinement_never_makes_a_step_longer_or_a_stage_overflow(problem: PartitionProblem) -> None:
    try:
        exact = find_algorithm("dp").partition(problem)
    except PartitionError:
        return
    before = np.array([exact.stage_of[node.name] for node in problem.units.nodes])
    placed, _ = refine(problem, before, problem.devices)
    names = problem.units.stages_of_nodes([int(stage) for stage in placed], problem.stages)
    assert all(names[source] <= names[node.name] for node in problem.graph.nodes for source in node.inputs)
    after = measured(problem, placed)
    assert after.fits
    assert after.step.step_us <= exact.step_us * (1 + 1e-9)


@quick
@given(seed=st.integers(0, 10**6), nodes=st.integers(1, 40))
def test_every_candidate_order_is_topological(seed: int, nodes: int) -> None:
    problem = PartitionProblem(graph=make_graph(seed, nodes), devices=(DeviceSpec(name="d"),))
    for order in candidate_orders(problem.units).values():
        position = {unit: place for place, unit in enumerate(order)}
        assert sorted(position) == list(range(nodes))
        for unit, inputs in enumerate(problem.units.inputs):
            assert all(position[source] < position[unit] for source in inputs)


@pytest.mark.parametrize("name", NAMES)
def test_a_stage_for_each_node_leaves_one_node_in_each(name: str) -> None:
    problem = PartitionProblem(graph=chain([5, 1, 3, 2]), devices=tuple(DeviceSpec(name=f"d{i}") for i in range(4)))
    if name.startswith("type:"):
        name = "type:layers"
    made = partition(problem, name)
    assert [made.stage_of[f"n{index}"] for index in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_that_takes_no_time_is_still_cut(name: str) -> None:
    problem = PartitionProblem(graph=chain([0.0] * 6), devices=tuple(DeviceSpec(name=f"d{i}") for i in range(3)))
    assert_valid(problem, find_algorithm(name.replace("blocks", "layers")).partition(problem))


def test_auto_names_what_it_chose_and_what_has_no_room() -> None:
    graph = chain([10, 10, 10, 100])
    devices = tuple(DeviceSpec(name=f"d{index}", memory_cap_bytes=9000) for index in range(2))
    made = partition(PartitionProblem(graph=graph, devices=devices, cost_model=CostModel(memory_buffer=0.0)))
    assert made.algorithm == "auto"
    assert "dp" in made.reason
    assert "balance_by_time" in made.reason.split("without room: ")[1]


def test_a_fast_device_gets_more_work() -> None:
    devices = (DeviceSpec(name="slow"), DeviceSpec(name="fast", speed=3.0))
    made = partition(PartitionProblem(graph=chain([1.0] * 8), devices=devices, links=LinkSpec(bytes_per_us=1e9)))
    assert [stage for name, stage in made.stage_of.items() if name.startswith("n")] == [0] * 2 + [1] * 6


@pytest.mark.parametrize(("reorder", "expected"), [(False, ("small", "large")), (True, ("large", "small"))])
def test_devices_are_reordered_only_where_the_problem_allows_it(reorder: bool, expected: tuple[str, str]) -> None:
    graph = chain([1.0] * 2 + [20.0] * 2)
    devices = (DeviceSpec(name="small", speed=1.0), DeviceSpec(name="large", speed=20.0))
    first = chain([20.0] * 2 + [1.0] * 2)
    problem = PartitionProblem(graph=first if reorder else graph, devices=devices, reorder_devices=reorder)
    assert partition(problem).devices == expected
