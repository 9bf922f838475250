"""The steps of the algorithms, each against what its source says."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.partition.graphs import chain, gpt
from tests.partition.random_graphs import measured, problems
from torch_lms.errors import PartitionError
from torch_lms.partition import (
    CostGraph,
    CostModel,
    CostNode,
    DeviceSpec,
    LinkSpec,
    PartitionProblem,
    find_algorithm,
    partition,
)
from torch_lms.partition.algorithms.block import block_cuts
from torch_lms.partition.algorithms.dapple import plan_latency
from torch_lms.partition.algorithms.fiduccia_mattheyses import _State
from torch_lms.partition.algorithms.merging import merge
from torch_lms.partition.algorithms.sagemaker import dhondt
from torch_lms.partition.bisection import lightest_cuts
from torch_lms.partition.layers import Layers
from torch_lms.partition.repair import forward_only
from torch_lms.partition.sequence import UnitSequence

numbers = st.lists(st.integers(0, 50), min_size=1, max_size=9)


def sums(weights: list[int], cuts: list[int]) -> list[int]:
    marks = [0, *cuts, len(weights)]
    return [sum(weights[start:end]) for start, end in itertools.pairwise(marks)]


def every_cut(count: int, parts: int) -> list[list[int]]:
    return [list(cuts) for cuts in itertools.combinations(range(1, count), parts - 1)]


@settings(deadline=None)
@given(weights=numbers, data=st.data())
def test_blocks_have_the_least_variance_and_differ_by_no_more_than_the_largest_number(
    weights: list[int], data: st.DataObject
) -> None:
    parts = data.draw(st.integers(1, len(weights)))
    found = sums(weights, block_cuts(weights, parts))
    squares = [sum(one**2 for one in sums(weights, cuts)) for cuts in every_cut(len(weights), parts)]
    assert sum(one**2 for one in found) == min(squares)
    assert len(found) == parts


@settings(deadline=None)
@given(weights=numbers, data=st.data())
def test_the_heaviest_stage_is_as_light_as_can_be(weights: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(weights)))
    found = lightest_cuts(np.array(weights, dtype=np.float64), parts)
    assert max(sums(weights, found)) == min(max(sums(weights, cuts)) for cuts in every_cut(len(weights), parts))
    assert all(start < end for start, end in itertools.pairwise([0, *found, len(weights)]))


def test_dhondt_gives_the_seats_of_the_textbook_example() -> None:
    assert dhondt([100_000, 80_000, 30_000, 20_000], 8) == [4, 3, 1, 0]


def test_the_latency_of_a_plan_is_that_of_its_pivot() -> None:
    forward, backward = np.array([[1.0], [4.0], [1.0]]), np.array([[2.0], [6.0], [2.0]])
    # Stage 1 waits for no one: 9 more microbatches of 10, after 3 + 10 for the first one up to it and back.
    assert plan_latency(forward, backward, 10)[0] == pytest.approx(13 + 9 * 10)
    assert plan_latency(forward[::-1], backward[::-1], 1)[0] == pytest.approx(3 + 10 + 3)


def test_merging_keeps_the_cheapest_border() -> None:
    crossing = np.array([0.0, 9, 9, 1, 9, 9, 0])
    assert merge(np.ones(6), crossing, 2) == [3]
    assert len(merge(np.ones(50), np.ones(51), 7)) == 6


def test_uniform_gives_the_first_stages_one_layer_more() -> None:
    problem = PartitionProblem(graph=chain([1.0] * 8), devices=tuple(DeviceSpec(name=f"d{i}") for i in range(3)))
    stages = [stage for name, stage in partition(problem, "uniform").stage_of.items() if name.startswith("n")]
    assert stages == [0, 0, 0, 1, 1, 1, 2, 2]


def test_type_counts_the_layers_that_match() -> None:
    problem = PartitionProblem(graph=gpt(layers=6, hidden=64), devices=(DeviceSpec(name="a"), DeviceSpec(name="b")))
    made = partition(problem, "type:ATTENTION")
    attention = [made.stage_of[node.name] for node in problem.units.nodes if node.kind == "attention"]
    assert attention == [0, 0, 0, 1, 1, 1]


def test_layers_are_elements_of_lists_and_top_level_modules() -> None:
    problem = PartitionProblem(graph=gpt(layers=3, hidden=64), devices=(DeviceSpec(name="a"),))
    layers = Layers.of(problem.units, 2)
    names = [problem.units.nodes[start].module.split(".")[0] for start in layers.starts]
    assert names == ["wte", "h", "h", "h", "ln_f", "lm_head", "loss"]
    assert len(Layers.of(problem.units, 8)) == len(problem.units)


@pytest.mark.parametrize("pattern", ["type:nothing-like-it", "type:["])
def test_a_type_that_matches_nothing_is_an_error(pattern: str) -> None:
    problem = PartitionProblem(graph=chain([1.0] * 3), devices=(DeviceSpec(name="a"),))
    with pytest.raises(PartitionError, match="expected"):
        partition(problem, pattern)


@settings(deadline=None)
@given(problem=problems(), seed=st.integers(0, 10**6))
def test_stages_from_anywhere_are_made_to_go_forward_with_work_for_each(problem: PartitionProblem, seed: int) -> None:
    draw = random.Random(seed)
    anywhere = np.array([draw.randrange(problem.stages) for _ in range(len(problem.units))])
    placed = forward_only(problem.units, anywhere, problem.stages)
    assert set(placed) == set(range(problem.stages))
    for unit, inputs in enumerate(problem.units.inputs):
        assert all(placed[source] <= placed[unit] for source in inputs)


@settings(deadline=None)
@given(problem=problems(schedules=("1f1b",)), seed=st.integers(0, 10**6))
def test_moves_over_borders_keep_the_books_right(problem: PartitionProblem, seed: int) -> None:
    draw = random.Random(seed)
    cuts = sorted(draw.sample(range(1, len(problem.units)), problem.stages - 1))
    state = _State(problem, UnitSequence(problem.units).stages(cuts), problem.devices)
    before, moves = state.placed_array(), []
    for _ in range(12):
        possible = sorted(state.possible())
        if not possible:
            break
        moves.append(draw.choice(possible))
        foretold = state.key_after(moves[-1])
        state.make(moves[-1])
        figures = measured(problem, state.placed_array())
        afresh = _State(problem, state.placed_array(), problem.devices)
        assert state.key().step_us == pytest.approx(afresh.key().step_us)
        assert foretold.step_us == pytest.approx(afresh.key().step_us)
        assert (tuple(state.forward), tuple(state.backward)) == (figures.cut_forward_bytes, figures.cut_backward_bytes)
    state.undo(moves)
    assert np.array_equal(state.placed_array(), before)


def test_refinement_leaves_contiguous_stages_where_branches_allow_it() -> None:
    """Two branches of 6 and 5, run one after the other, cannot be cut evenly in that order; across it they can."""
    times = {"a0": 3.0, "a1": 3.0, "b0": 4.0, "b1": 1.0, "end": 1.0}
    inputs = {"a0": ("x",), "a1": ("a0",), "b0": ("x",), "b1": ("b0",), "end": ("a1", "b1")}
    nodes = [CostNode(name="x", kind="placeholder")]
    nodes += [CostNode(name=name, forward_us=time, inputs=inputs[name]) for name, time in times.items()]
    graph = CostGraph(nodes=(*nodes, CostNode(name="output", kind="output", inputs=("end",))))
    problem = PartitionProblem(graph=graph, devices=(DeviceSpec(name="d0"), DeviceSpec(name="d1")))
    assert find_algorithm("balance_by_time").partition(problem).bottleneck_us == 6.0
    assert partition(problem).bottleneck_us == 6.0
    three = PartitionProblem(graph=graph, devices=tuple(DeviceSpec(name=f"d{index}") for index in range(3)))
    assert partition(three).bottleneck_us <= 5.0


def test_dawnpiper_gives_up_time_where_memory_runs_out() -> None:
    graph = chain([10.0, 10, 10, 10, 10, 10])
    model = CostModel(microbatches=4, memory_buffer=0.0)
    free = PartitionProblem(graph=graph, devices=(DeviceSpec(name="a"), DeviceSpec(name="b")), cost_model=model)
    even = partition(free, "dawnpiper")
    assert even.imbalance == 1.0
    caps = [even.stage_memory_bytes[0] - 1, even.stage_memory_bytes[1] * 3]
    devices = tuple(DeviceSpec(name=f"d{index}", memory_cap_bytes=cap) for index, cap in enumerate(caps))
    tight = partition(PartitionProblem(graph=graph, devices=devices, cost_model=model), "dawnpiper")
    assert tight.stage_time_us[0] < tight.stage_time_us[1]


def test_a_slow_link_moves_the_cut_to_where_few_bytes_cross() -> None:
    sizes = [10**6] * 5 + [10] + [10**6] * 4
    nodes = [CostNode(name="n0", forward_us=10.0, output_bytes=sizes[0])]
    for index in range(1, 10):
        nodes.append(CostNode(name=f"n{index}", forward_us=10.0, output_bytes=sizes[index], inputs=(f"n{index - 1}",)))
    problem = PartitionProblem(
        graph=CostGraph(nodes=tuple(nodes)),
        devices=(DeviceSpec(name="a"), DeviceSpec(name="b")),
        links=LinkSpec(bytes_per_us=1000.0),
    )
    assert partition(problem).cut_bytes == (10,)
