"""The RFC's bottom-up merging: what is merged, in which order, and when it ends."""

from __future__ import annotations

import itertools

import pytest

from tests.partition.graphs import chain
from torch_lms.partition import CostGraph, CostModel, CostNode, DeviceSpec, LinkSpec, PartitionProblem, partition
from torch_lms.partition.algorithms.merging import Merging

TWO = (DeviceSpec(name="a"), DeviceSpec(name="b"))


def merged(costs: list[float], borders: list[float], devices: int) -> list[int]:
    merging = Merging(costs, borders, devices)
    merging.scan()
    return merging.cuts()


def test_each_node_begins_as_a_part() -> None:
    merging = Merging([0.5, 0.25, 0.25], [0.0, 0.0], 2)
    assert merging.parts == 3
    assert merging.cuts() == [1, 2]
    assert merging.cost() == 0.5


def test_parts_are_merged_if_that_lowers_the_cost() -> None:
    """Within an even share of 0.5 a merge saves its border; beyond, the border must be dearer than the rise."""
    assert merged([0.25] * 4, [0.1, 0.1, 0.1], 2) == [2]
    assert merged([0.3, 0.3, 0.2, 0.2], [0.09, 0.01, 0.01], 2) == [1, 3]
    assert merged([0.3, 0.3, 0.2, 0.2], [0.11, 0.01, 0.01], 2) == [2]


def test_each_merge_of_the_scan_lowers_the_cost_and_in_the_end_none_would() -> None:
    costs, borders = [0.1, 0.25, 0.2, 0.1, 0.35], [0.02, 0.03, 0.01, 0.05]
    merging = Merging(costs, borders, 2)
    before = merging.cost()
    merging.scan()
    assert merging.cost() < before
    marks = [0, *merging.cuts(), len(costs)]
    parts = [sum(costs[start:end]) for start, end in itertools.pairwise(marks)]
    assert len(parts) > 2
    for index, (one, other) in enumerate(itertools.pairwise(parts)):
        assert max(one + other, *parts, 0.5) - max(*parts, 0.5) > borders[marks[index + 1] - 1]


def test_the_scan_ends_at_a_part_for_each_device_though_more_merging_would_lower_the_cost() -> None:
    assert merged([0.25] * 4, [9.0, 9.0, 9.0], 2) == [3]
    assert merged([0.25] * 4, [9.0, 9.0, 9.0], 1) == []


def test_what_is_left_beyond_the_devices_is_merged_by_the_least_rise() -> None:
    merging = Merging([0.3, 0.4, 0.3], [0.0, 0.05], 2)
    merging.scan()
    assert merging.cuts() == [1, 2]
    merging.force()
    assert merging.cuts() == [1]


def test_the_order_of_merging_is_breadth_first() -> None:
    """Two branches one after the other in the graph's order: across them lie the nodes of the same distance."""
    inputs = {"a0": (), "a1": ("a0",), "b0": (), "b1": ("b0",)}
    nodes = tuple(CostNode(name=name, forward_us=1.0, inputs=read) for name, read in inputs.items())
    made = partition(PartitionProblem(graph=CostGraph(nodes=nodes), devices=TWO), "merging")
    assert dict(made.stage_of) == {"a0": 0, "b0": 0, "a1": 1, "b1": 1}


@pytest.mark.parametrize(("bytes_per_us", "stages"), [(1e9, [0, 0, 0, 1, 1, 1]), (10.0, [0, 0, 0, 0, 0, 1])])
def test_transfers_on_the_devices_link_count_as_communication(bytes_per_us: float, stages: list[int]) -> None:
    """On a slow link each border costs more than what uneven stages do."""
    problem = PartitionProblem(
        graph=chain([10.0] * 6), devices=TWO, links=LinkSpec(bytes_per_us=bytes_per_us),
        cost_model=CostModel(microbatches=1),
    )  # fmt: skip
    assert [partition(problem, "merging").stage_of[f"n{index}"] for index in range(6)] == stages
