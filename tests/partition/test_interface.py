"""The interface: what is refused with which words, own algorithms, and the place for swap and recompute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings

from tests.partition.graphs import chain
from tests.partition.random_graphs import make_graph, problems
from torch_lms.errors import PartitionError
from torch_lms.partition import (
    Choice,
    CostGraph,
    CostModel,
    CostNode,
    DeviceSpec,
    GivenUp,
    LinkSpec,
    Partition,
    PartitionProblem,
    Relieved,
    StageNeed,
    algorithm_names,
    check_partition,
    find_algorithm,
    least_caps,
    partition,
)
from torch_lms.partition.interface import evaluate


def devices(count: int, cap: int | None = None) -> tuple[DeviceSpec, ...]:
    return tuple(DeviceSpec(name=f"cuda:{index}", memory_cap_bytes=cap) for index in range(count))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": devices(4)}, "at most as many stages as nodes that compute, found 4 stages for 3"),
        ({"devices": devices(2), "stages": 3}, "one device for each of 3 stages, found 2"),
        ({"devices": ()}, "at least 1 stage"),
        ({"devices": devices(2), "links": {("cuda:0", "cuda:9"): LinkSpec()}}, "'cuda:9', which is not there"),
    ],
)
def test_a_problem_that_cannot_be_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        PartitionProblem(graph=chain([1.0] * 3), **changes)  # type: ignore[arg-type]


def test_a_missing_link_is_named() -> None:
    links = {("cuda:0", "cuda:1"): LinkSpec()}
    with pytest.raises(PartitionError, match="expected a link from cuda:1 to cuda:2, found none"):
        partition(PartitionProblem(graph=chain([1.0] * 4), devices=devices(3), links=links))


def test_a_link_counts_for_both_directions_and_by_its_own_rate() -> None:
    links = {("cuda:1", "cuda:0"): LinkSpec(bytes_per_us=1000.0), ("cuda:1", "cuda:2"): LinkSpec(bytes_per_us=10.0)}
    problem = PartitionProblem(graph=chain([9.0] * 3), devices=devices(3), links=links)
    assert [link.bytes_per_us for link in problem.links_between(problem.devices)] == [1000.0, 10.0]
    model = CostModel(microbatches=1)
    problem = PartitionProblem(graph=chain([9.0] * 3), devices=devices(3), links=links, cost_model=model)
    assert partition(problem).step_us == pytest.approx(27 + 2 * 1 + 2 * 100)


@pytest.mark.parametrize("name", ["", "fastest", "type"])
def test_an_unknown_algorithm_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(PartitionError, match=r"expected an algorithm among auto, dp, .*found"):
        find_algorithm(name)


def test_every_algorithm_says_its_name_and_source() -> None:
    for name in algorithm_names():
        assert find_algorithm(name).name == name
        assert find_algorithm(name).source


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n1": None}, "a stage from 0 to 1 for node 'n1', found None"),
        ({"n1": 2}, "found 2"),
        ({"extra": 0}, "only nodes of the graph, found 'extra'"),
        (
            {"n0": 1},
            "found 'n0' of stage 1 read by 'n1' of stage 0, while 'n1' reads|found 'n0' of stage 1 read by 'n1'",
        ),
        ({"n1": 1, "n2": 0}, "'n1' of stage 1 read by 'n2' of stage 0, while 'n1' reads 'n0' the other way: a cycle"),
        ({"n2": 0, "output": 0}, "work for each of 2 stages, found none for stage 1"),
    ],
)
def test_a_wrong_placement_is_refused_with_the_place(changes: dict[str, int | None], message: str) -> None:
    graph = chain([1.0] * 3)
    placed = {"x": 0, "n0": 0, "n1": 0, "n2": 1, "output": 1} | changes
    with pytest.raises(PartitionError, match=message):
        check_partition(graph, {name: stage for name, stage in placed.items() if stage is not None}, 2)


@settings(deadline=None)
@given(problem=problems())
def test_model_inputs_outputs_and_attributes_stand_with_first_last_and_their_readers(problem: PartitionProblem) -> None:
    stage_of = partition(problem, "balance_by_time").stage_of
    readers: dict[str, list[int]] = {}
    for node in problem.graph.nodes:
        for name in node.inputs:
            readers.setdefault(name, []).append(stage_of[node.name])
    for node in problem.graph.nodes:
        expected = {"placeholder": 0, "output": problem.stages - 1, "get_attr": min(readers.get(node.name, [0]))}
        assert stage_of[node.name] == expected.get(node.kind, stage_of[node.name])


def test_an_algorithm_of_ones_own_is_measured_and_checked() -> None:
    class LastAlone:
        name = "last-alone"
        source = "this test"

        def partition(self, problem: PartitionProblem) -> Partition:
            placed = np.array([0] * (len(problem.units) - 1) + [1])
            return evaluate(problem, placed, algorithm=self.name, reason="as told")

    made = partition(PartitionProblem(graph=chain([1.0, 2.0, 3.0]), devices=devices(2)), LastAlone())
    assert made.stage_time_us == (3.0, 3.0)
    assert made.imbalance == 1.0


def test_a_partition_that_does_not_fit_is_refused_with_what_would() -> None:
    graph = chain([1.0] * 8)
    needed = least_caps(PartitionProblem(graph=graph, devices=devices(2, cap=1)))
    enough = PartitionProblem(graph=graph, devices=devices(2, cap=needed.caps[0]))
    assert partition(enough).fits
    with pytest.raises(PartitionError, match=r"stage 0 of algorithm 'uniform' with .* algorithm 'auto' finds stages"):
        partition(enough, "uniform")
    least = needed.caps[0]
    assert least is not None
    with pytest.raises(PartitionError, match=f"found none; the least cap that works for every device is {least}"):
        partition(PartitionProblem(graph=graph, devices=devices(2, cap=least - 2)))


def test_unequal_caps_are_advised_in_proportion() -> None:
    small, large = DeviceSpec(name="a", memory_cap_bytes=1000), DeviceSpec(name="b", memory_cap_bytes=4000)
    problem = PartitionProblem(graph=chain([1.0] * 8), devices=(small, large))
    with pytest.raises(PartitionError, match=r"the least caps that work are \d+\.\d+ times those given"):
        partition(problem)
    advised = least_caps(problem).caps
    assert advised[0] is not None
    roomy = tuple(
        DeviceSpec(name=one.name, memory_cap_bytes=cap) for one, cap in zip((small, large), advised, strict=True)
    )
    assert partition(PartitionProblem(graph=problem.graph, devices=roomy)).fits


class GiveUpAll:
    """Estimates that what is held can be lowered by as much as is needed; then computes all segments again, or none."""

    host_link = None
    swap_last = False

    def relieve(self, need: StageNeed, usable_bytes: float) -> Relieved:
        held = need.in_flight * need.held_bytes
        moved = np.clip(need.memory_bytes - usable_bytes, 0, held)
        return Relieved(time_us=need.time_us + moved / 1000, memory_bytes=need.memory_bytes - moved)

    def ways(self, needs: Mapping[int, StageNeed]) -> Sequence[Sequence[Choice]]:
        every = [
            GivenUp(stage, one, False) for stage, need in needs.items() for one in range(len(need.offers.segments))
        ]
        return [[tuple(every)]]


@pytest.mark.parametrize("algorithm", ["dp", "auto"])
def test_relief_inside_a_stage_makes_it_fit_at_a_cost_in_time(algorithm: str) -> None:
    graph = chain([10.0] * 8, output_bytes=100)
    cap = 8_000
    plain = PartitionProblem(graph=graph, devices=devices(2, cap=cap))
    with pytest.raises(PartitionError, match="least cap"):
        partition(plain, algorithm)
    model = CostModel(relief=GiveUpAll())
    made = partition(PartitionProblem(graph=graph, devices=devices(2, cap=cap), cost_model=model), algorithm)
    assert made.fits
    free = partition(PartitionProblem(graph=graph, devices=devices(2)), algorithm)
    assert sum(made.stage_time_us) > sum(free.stage_time_us)


def test_the_same_problem_gives_the_same_partition() -> None:
    def made() -> Partition:
        return partition(PartitionProblem(graph=make_graph(7, 40), devices=devices(4)))

    assert made() == made()


def test_no_border_lies_between_a_tuple_and_its_elements() -> None:
    nodes = (
        CostNode(name="a", forward_us=1.0, output_bytes=10),
        CostNode(name="split", inputs=("a",), forward_us=1.0, output_bytes=10),
        CostNode(name="left", inputs=("split",), output_bytes=4, element=True),
        CostNode(name="right", inputs=("split",), output_bytes=6, element=True),
        CostNode(name="first", inputs=("left",), output_bytes=1, element=True),
        CostNode(name="b", inputs=("first", "right"), forward_us=1.0),
    )
    made = partition(PartitionProblem(graph=CostGraph(nodes=nodes), devices=devices(3)))
    assert [made.stage_of[node.name] for node in nodes] == [0, 1, 1, 1, 1, 2]
    assert made.cut_bytes == (10, 1 + 6)
