"""Fiduccia-Mattheyses: bucket arrays, books that only a move's neighbours change, and passes in linear time."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.partition.graphs import gpt
from tests.partition.random_graphs import contiguous_placements, measured, problems
from torch_lms.partition import CostGraph, CostNode, DeviceSpec, LinkSpec, PartitionProblem
from torch_lms.partition.algorithms.fiduccia_mattheyses import Pass, refine
from torch_lms.partition.gain_buckets import GainBuckets, bucket_of
from torch_lms.partition.placement import Move, Placement
from torch_lms.partition.sequence import UnitSequence


def every_move(placement: Placement) -> list[Move]:
    """All moves that let no value go back and leave no stage empty."""
    return [
        Move(unit, stage, target)
        for unit, stage in enumerate(placement.stage)
        if placement.count[stage] > 1
        for target in placement.targets(unit)
    ]


@given(gains=st.lists(st.integers(-(2**61), 2**61), min_size=2, max_size=2))
def test_buckets_keep_the_order_of_gains_and_hold_only_close_ones(gains: list[int]) -> None:
    less, more = sorted(gains)
    assert bucket_of(less) <= bucket_of(more)
    if bucket_of(less) == bucket_of(more):
        assert abs(more - less) * 4 <= max(abs(less), abs(more))


def test_small_gains_have_buckets_of_their_own() -> None:
    assert len({bucket_of(gain) for gain in range(-7, 8)}) == 15


def test_the_highest_gain_comes_first_and_of_equal_ones_the_last_that_came() -> None:
    buckets = GainBuckets()
    for cell, gain in enumerate([3, -1, 7, 3, 0, 10**12]):
        buckets.put(cell, gain)
    assert buckets.highest(6) == [5, 2, 3, 0, 4, 1]
    assert buckets.highest(3) == [5, 2, 3]
    buckets.drop(5)
    buckets.put(1, 7)
    buckets.put(2, -(10**12))
    assert buckets.highest(9) == [1, 3, 0, 4, 2]
    for cell in range(6):
        buckets.drop(cell)
    assert buckets.highest(1) == []


def drawn_placement(problem: PartitionProblem, seed: int) -> tuple[random.Random, Placement]:
    """Contiguous stages, and what drew them."""
    draw = random.Random(seed)
    cuts = sorted(draw.sample(range(1, len(problem.units)), problem.stages - 1))
    return draw, Placement(problem, UnitSequence(problem.units).stages(cuts), problem.devices)


@settings(deadline=None)
@given(problem=problems(), seed=st.integers(0, 10**6))
def test_moves_over_borders_keep_the_books_right(problem: PartitionProblem, seed: int) -> None:
    draw, placement = drawn_placement(problem, seed)
    before, moves = placement.placed_array(), []
    for _ in range(12):
        possible = every_move(placement)
        if not possible:
            break
        moves.append(draw.choice(possible))
        unit, _, target = moves[-1]
        foretold, gain = placement.progress(moves[-1]), placement.gain(unit, target)
        sent = sum(placement.forward) + sum(placement.backward)
        placement.make(moves[-1])
        figures = measured(problem, placement.placed_array())
        afresh = Placement(problem, placement.placed_array(), problem.devices).progress()
        assert placement.progress().step_us == pytest.approx(afresh.step_us)
        assert foretold.step_us == pytest.approx(afresh.step_us)
        assert (tuple(placement.forward), tuple(placement.backward)) == (
            figures.cut_forward_bytes, figures.cut_backward_bytes
        )  # fmt: skip
        assert gain == sent - sum(placement.forward) - sum(placement.backward)
        assert gains(placement) == gains(Placement(problem, placement.placed_array(), problem.devices))
    placement.undo(moves)
    assert np.array_equal(placement.placed_array(), before)


def gains(placement: Placement) -> dict[tuple[int, int], int]:
    """Of each unit and each stage that it may move to."""
    units = range(len(placement.stage))
    return {(unit, target): placement.gain(unit, target) for unit in units for target in placement.targets(unit)}


@settings(deadline=None)
@given(problem=problems(), seed=st.integers(0, 10**6))
def test_a_move_touches_every_unit_whose_gains_it_changes(problem: PartitionProblem, seed: int) -> None:
    draw, placement = drawn_placement(problem, seed)
    for _ in range(6):
        possible = every_move(placement)
        if not possible:
            break
        before = gains(placement)
        touched = placement.make(draw.choice(possible))
        changed = {unit for (unit, _), _ in before.items() ^ gains(placement).items()}
        assert changed <= touched


def shared_value(readers: int) -> CostGraph:
    """One value that many nodes read, and whose readers one node reads."""
    names = [f"n{index}" for index in range(readers)]
    nodes = [CostNode(name="first", forward_us=1.0, output_bytes=100)]
    nodes += [CostNode(name=name, forward_us=1.0, output_bytes=8, inputs=("first",)) for name in names]
    return CostGraph(nodes=(*nodes, CostNode(name="last", forward_us=1.0, inputs=tuple(names))))


def operations_of_a_pass(graph: CostGraph, stages: int) -> tuple[float, int]:
    """Operations of a pass that ends only where no move is left, for each pin; and how many moves it made."""
    devices = tuple(DeviceSpec(name=f"d{index}") for index in range(stages))
    problem = PartitionProblem(graph=graph, devices=devices, links=LinkSpec(bytes_per_us=100.0))
    count = len(problem.units)
    cuts = [count * stage // stages for stage in range(1, stages)]
    placement = Placement(problem, UnitSequence(problem.units).stages(cuts), problem.devices)
    one_pass = Pass(placement)
    moves, _ = one_pass.run(most=count + 1, patience=count + 1)
    assert len({move.unit for move in moves}) == len(moves)
    pins = count + sum(len(inputs) for inputs in problem.units.inputs)
    return (placement.pins + one_pass.operations) / pins, len(moves)


@pytest.mark.parametrize("make", [shared_value, lambda size: gpt(layers=size // 12)], ids=["one net", "gpt"])
@pytest.mark.parametrize("stages", [2, 4])
def test_the_operations_of_a_pass_are_linear_in_the_pins(make: object, stages: int) -> None:
    small, moved = operations_of_a_pass(make(240), stages)  # type: ignore[operator]
    large, more = operations_of_a_pass(make(1920), stages)  # type: ignore[operator]
    assert large <= 1.25 * small
    assert more >= moved > 0


def branches() -> CostGraph:
    """Two branches, one after the other in the graph's order."""
    times = {"a0": 3.0, "a1": 3.0, "b0": 4.0, "b1": 1.0, "end": 1.0}
    inputs = {"a0": ("x",), "a1": ("a0",), "b0": ("x",), "b1": ("b0",), "end": ("a1", "b1")}
    nodes = [CostNode(name="x", kind="placeholder")]
    nodes += [CostNode(name=name, forward_us=time, inputs=inputs[name]) for name, time in times.items()]
    return CostGraph(nodes=(*nodes, CostNode(name="output", kind="output", inputs=("end",))))


def test_refinement_leaves_contiguous_stages_where_branches_allow_it() -> None:
    """No cut of the order has stages of at most 5; b0 beside a0 does."""
    problem = PartitionProblem(graph=branches(), devices=tuple(DeviceSpec(name=f"d{index}") for index in range(3)))
    starts = [placed for _, placed in contiguous_placements(problem)]
    slowest_us = [max(measured(problem, start).stage_time_us) for start in starts]
    assert min(slowest_us) == 6.0
    refined = [refine(problem, start, problem.devices)[0] for start in starts]
    refined_us = [max(measured(problem, placed).stage_time_us) for placed in refined]
    assert min(refined_us) == 4.0
    assert all(after <= before for before, after in zip(slowest_us, refined_us, strict=True))
