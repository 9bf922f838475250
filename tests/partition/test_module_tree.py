"""SageMaker's partition: the paper's three algorithms step by step, and what a pipeline adds."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_lms.partition import CostGraph, CostModel, CostNode, DeviceSpec, PartitionProblem, partition
from torch_lms.partition.algorithms.sagemaker import ModuleNode, allot_devices, cut_segments, dhondt, find_devices


def node(name: str, *inputs: str, us: float = 1.0, module: str = "") -> CostNode:
    return CostNode(name=name, inputs=inputs, forward_us=us, module=module)


def stages_of(nodes: list[CostNode], stages: int) -> dict[str, int]:
    devices = tuple(DeviceSpec(name=f"d{index}") for index in range(stages))
    model = CostModel(time_weight=1.0, memory_weight=0.0)
    problem = PartitionProblem(graph=CostGraph(nodes=tuple(nodes)), devices=devices, cost_model=model)
    return dict(partition(problem, "sagemaker").stage_of)


def test_dhondt_gives_the_seats_of_the_textbook_example() -> None:
    assert dhondt([100_000, 80_000, 30_000, 20_000], 8) == [4, 3, 1, 0]


@settings(deadline=None)
@given(costs=st.lists(st.integers(0, 9), min_size=1, max_size=8), data=st.data())
def test_segments_have_the_least_largest_cost(costs: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(costs)))

    def largest(cuts: tuple[int, ...]) -> int:
        return max(sum(costs[start:end]) for start, end in itertools.pairwise([0, *cuts, len(costs)]))

    found = cut_segments(costs, count)
    assert len(found) == count - 1
    assert all(start < end for start, end in itertools.pairwise([0, *found, len(costs)]))
    assert largest(tuple(found)) == min(map(largest, itertools.combinations(range(1, len(costs)), count - 1)))


@pytest.mark.parametrize(
    ("costs", "devices", "expected"),
    [
        # One device goes to all, in one segment or several.
        ([1, 2, 3], [5], [[5], [5], [5]]),
        # Fewer children than devices: one segment each, devices by cost.
        ([3, 1], [0, 1, 2, 3], [[0, 1, 2], [3]]),
        # Segments 8 | 1 1: d'Hondt gives both devices to the first; the others run on d(n), their parent's first.
        ([8, 1, 1], [2, 3], [[2, 3], [2], [2]]),
        # Segments 4 4 | 4 4 | 9 with the least largest cost of 9; with a device each, their children share it.
        ([4, 4, 4, 4, 9], [0, 1, 2], [[0], [0], [1], [1], [2]]),
        # Segments 1 | 9 1, both devices for the second, which is several children: it is cut again, into 9 | 1.
        ([1, 9, 1], [0, 1], [[0], [0, 1], [0]]),
    ],
)
def test_siblings_share_devices_as_algorithm_2_says(
    costs: list[float], devices: list[int], expected: list[list[int]]
) -> None:
    assert allot_devices(costs, devices) == expected


def test_the_tree_is_walked_in_breadth_first_order_and_a_single_device_is_handed_down() -> None:
    """Costs 6 and 2 get three devices and one; below the first, 3, 2 and 1 get one each."""
    first = ModuleNode(
        cost=6.0, children={name: ModuleNode(cost=cost) for name, cost in (("a", 3), ("b", 2), ("c", 1))}
    )
    second = ModuleNode(cost=2.0, children={"a": ModuleNode(cost=1.0), "b": ModuleNode(cost=1.0)})
    root = ModuleNode(cost=8.0, children={"first": first, "second": second})
    found = find_devices(root, 4)
    expected = [root, first, second, *first.children.values(), *second.children.values()]
    assert all(module is one for (module, _), one in zip(found, expected, strict=True))
    assert [device for _, device in found] == [0, 0, 3, 0, 2, 0, 3, 3]


def test_a_module_with_one_device_stays_whole() -> None:
    nodes = [node("a0", module="a.x"), node("a1", "a0", module="a.y"), node("a2", "a1", module="a")]
    nodes += [node("b0", "a2", us=2.0, module="b.x"), node("b1", "b0", us=1.0, module="b.y")]
    assert stages_of(nodes, 2) == {"a0": 0, "a1": 0, "a2": 0, "b0": 1, "b1": 1}


def test_own_operations_of_a_module_run_on_its_first_device_or_later_where_their_inputs_are() -> None:
    """The root's own operation before its children is on device 0, the one behind them cannot go back there."""
    nodes = [node("in", us=0.0), node("a", "in", us=5.0, module="a"), node("b", "a", us=5.0, module="b")]
    nodes.append(node("out", "b", us=0.0))
    assert stages_of(nodes, 2) == {"in": 0, "a": 0, "b": 1, "out": 1}


def test_devices_that_modules_have_no_use_for_take_half_of_the_busiest_stage() -> None:
    nodes = [node("n0", module="only")]
    nodes += [node(f"n{index}", f"n{index - 1}", module="only") for index in range(1, 4)]
    assert stages_of(nodes, 2) == {"n0": 0, "n1": 0, "n2": 1, "n3": 1}


def test_memory_weighs_in_a_modules_cost() -> None:
    """By time c belongs with nothing, by memory a does: its parameters are most of the model."""
    times = {"a": 1.0, "b": 1.0, "c": 4.0}
    nodes = [CostNode(name="a", forward_us=1.0, module="a", parameters=("w",))]
    nodes += [node(name, before, us=times[name], module=name) for before, name in itertools.pairwise("abc")]
    graph = CostGraph(nodes=tuple(nodes), parameter_bytes={"w": 10**6})
    devices = (DeviceSpec(name="d0"), DeviceSpec(name="d1"))
    by_weight = {}
    for weight in (0.0, 0.5):
        model = CostModel(time_weight=1 - weight, memory_weight=weight)
        made = partition(PartitionProblem(graph=graph, devices=devices, cost_model=model), "sagemaker")
        by_weight[weight] = [made.stage_of[name] for name in "abc"]
    assert by_weight[0.0] == [0, 0, 1]
    assert by_weight[0.5] == [0, 1, 1]
