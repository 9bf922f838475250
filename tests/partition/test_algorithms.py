"""What every algorithm must keep to, on random graphs."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.partition.graphs import chain
from tests.partition.random_graphs import make_graph, measured, problems
from torch_lms.errors import PartitionError
from torch_lms.partition import (
    CostGraph,
    CostModel,
    CostNode,
    DeviceSpec,
    LinkSpec,
    Partition,
    PartitionProblem,
    algorithm_names,
    find_algorithm,
    partition,
)
from torch_lms.partition.algorithms.auto import Auto
from torch_lms.partition.algorithms.fiduccia_mattheyses import refine
from torch_lms.partition.interface import evaluate
from torch_lms.partition.orders import candidate_orders
from torch_lms.partition.sequence import UnitSequence

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
@given(problem=problems(schedules=("1f1b",)), seed=st.integers(0, 10**6))
def test_auto_is_never_worse_than_a_cut_of_any_order(problem: PartitionProblem, seed: int) -> None:
    best = find_algorithm("auto").partition(problem)
    draw = random.Random(seed)
    for order in problem.orders.values():
        for _ in range(5):
            cuts = sorted(draw.sample(range(1, len(problem.units)), problem.stages - 1))
            placed = UnitSequence(problem.units, order).stages(cuts)
            assert best.step_us <= measured(problem, placed).step.step_us * (1 + 1e-9)


class Told:
    """Places units as told, or finds nothing."""

    name = "told"
    source = "this test"

    def __init__(self, *stages: int) -> None:
        self._stages = stages

    def partition(self, problem: PartitionProblem) -> Partition:
        if not self._stages:
            raise PartitionError("expected stages, found none")
        return evaluate(problem, np.array(self._stages), algorithm=self.name, reason="as told")


def independent(times_us: list[float], cap: int | None = None) -> PartitionProblem:
    """Nodes that read nothing, on two devices, with as many bytes of parameters each."""
    nodes = tuple(
        CostNode(name=f"n{index}", forward_us=time_us, parameters=(f"w{index}",))
        for index, time_us in enumerate(times_us)
    )
    graph = CostGraph(nodes=nodes, parameter_bytes={f"w{index}": 100 for index in range(len(nodes))})
    devices = tuple(DeviceSpec(name=name, memory_cap_bytes=cap) for name in "ab")
    return PartitionProblem(graph=graph, devices=devices, cost_model=CostModel(memory_buffer=0.0))


def test_auto_takes_the_best_candidate_that_fits() -> None:
    """Into 57 and 58, which no cut and no moves from the best one find."""
    times, even = [19.0, 16.0, 5.0, 38.0, 5.0, 12.0, 20.0], (0, 0, 0, 1, 0, 0, 1)
    candidates = (Told(), Told(0, 0, 0, 0, 0, 0, 1), Told(*even), find_algorithm("uniform"))
    assert Auto(()).partition(independent(times)).bottleneck_us > 58
    found = Auto(candidates).partition(independent(times))
    assert found.reason.startswith("told: as told")
    assert found.stage_time_us == (57.0, 58.0)
    tight = independent(times, cap=max(found.stage_memory_bytes) - 1)
    assert Auto(candidates).partition(tight).bottleneck_us > 58


def test_auto_asks_every_algorithm_there_is() -> None:
    def unwilling(_: object, problem: PartitionProblem) -> Partition:
        asked.append(1)
        raise PartitionError("expected nothing, found that")

    asked: list[int] = []
    problem = PartitionProblem(graph=chain([1.0] * 4), devices=(DeviceSpec(name="a"), DeviceSpec(name="b")))
    with pytest.MonkeyPatch.context() as patch:
        for name in algorithm_names()[1:]:
            patch.setattr(type(find_algorithm(name)), "partition", unwilling)
        with pytest.raises(PartitionError, match="expected nothing"):
            find_algorithm("auto").partition(problem)
    assert len(asked) == len(algorithm_names()) - 1


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
    devices = tuple(DeviceSpec(name=f"d{index}", memory_cap_bytes=10_200) for index in range(2))
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
