"""Small graphs, every contiguous partition: the exact algorithm against plain enumeration."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.partition.random_graphs import contiguous_placements, measured, problems
from torch_lms.errors import PartitionError
from torch_lms.partition import (
    CostGraph,
    CostModel,
    CostNode,
    DeviceSpec,
    LinkSpec,
    PartitionProblem,
    find_algorithm,
    least_caps,
    partition,
)
from torch_lms.partition.contiguous import ContiguousStages
from torch_lms.partition.intervals import stage_matrices
from torch_lms.partition.sequence import UnitSequence

exhaustive = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
SMALL = 10


@exhaustive
@given(problem=problems(largest=SMALL, stages=4))
def test_matrices_say_the_memory_of_every_contiguous_stage(problem: PartitionProblem) -> None:
    cuts = np.arange(len(problem.units) + 1)
    matrices = stage_matrices(UnitSequence(problem.units), cuts, problem.cost_model)
    for inner, placed in contiguous_placements(problem):
        marks = [0, *inner, len(problem.units)]
        found = [
            matrices.static_bytes[start, end]
            + problem.step_on(problem.devices).in_flight[stage] * matrices.held_bytes[start, end]
            + matrices.transient_bytes[start, end]
            for stage, (start, end) in enumerate(itertools.pairwise(marks))
        ]
        assert tuple(math.ceil(one) for one in found) == measured(problem, placed).stage_memory_bytes


def exactly_enough(problem: PartitionProblem, which: int) -> PartitionProblem:
    """Caps that one of the contiguous partitions just fits."""
    placements = list(contiguous_placements(problem))
    need = measured(problem, placements[which % len(placements)][1]).stage_memory_bytes
    caps = [max(math.ceil(nbytes / (1 - problem.cost_model.memory_buffer)), 1) for nbytes in need]
    devices = tuple(
        DeviceSpec(name=one.name, speed=one.speed, memory_cap_bytes=cap)
        for one, cap in zip(problem.devices, caps, strict=True)
    )
    return PartitionProblem(graph=problem.graph, devices=devices, links=problem.links, cost_model=problem.cost_model)


@exhaustive
@given(problem=problems(largest=SMALL, stages=4), which=st.integers(0, 10**6))
def test_auto_fits_wherever_any_contiguous_partition_does(problem: PartitionProblem, which: int) -> None:
    assert partition(exactly_enough(problem, which)).fits


@exhaustive
@given(problem=problems(largest=SMALL, stages=4, capped=True))
def test_dynamic_programming_finds_the_shortest_step_of_an_order(problem: PartitionProblem) -> None:
    steps = [figures.step.step_us for _, placed in contiguous_placements(problem)
             if (figures := measured(problem, placed)).fits]  # fmt: skip
    links = problem.links_between(problem.devices)
    found = ContiguousStages(UnitSequence(problem.units), problem.devices, links, problem.cost_model).solve()
    if not steps:
        assert found is None
        return
    assert found is not None
    assert found.optimal
    assert found.step_us == pytest.approx(min(steps), rel=1e-6, abs=1e-9)
    assert measured(problem, UnitSequence(problem.units).stages(found.cuts)).step.step_us == pytest.approx(
        found.step_us
    )


@exhaustive
@given(problem=problems(largest=SMALL, stages=4))
def test_no_contiguous_partition_is_below_the_lower_bound(problem: PartitionProblem) -> None:
    for _, placed in contiguous_placements(problem):
        assert max(measured(problem, placed).stage_time_us) >= problem.lower_bound_us * (1 - 1e-9)


def with_caps(problem: PartitionProblem, cap: int) -> PartitionProblem:
    devices = tuple(DeviceSpec(name=one.name, speed=one.speed, memory_cap_bytes=cap) for one in problem.devices)
    return PartitionProblem(graph=problem.graph, devices=devices, links=problem.links, cost_model=problem.cost_model)


@exhaustive
@given(problem=problems(largest=SMALL, stages=3))
def test_the_least_cap_in_the_error_works_and_less_does_not(problem: PartitionProblem) -> None:
    hopeless = with_caps(problem, 1)
    cap = least_caps(hopeless).caps[0]
    assert cap is not None
    assume(cap > 1)
    with pytest.raises(PartitionError, match=f"least cap that works for every device is {cap} bytes"):
        find_algorithm("dp").partition(hopeless)
    assert find_algorithm("dp").partition(with_caps(problem, cap)).fits
    with pytest.raises(PartitionError):
        find_algorithm("dp").partition(with_caps(problem, math.floor(cap * (1 - 1e-6)) - 1))


@settings(deadline=None, max_examples=150)
@given(
    nodes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 60)), min_size=4, max_size=9),
    microbatches=st.integers(2, 5),
)
def test_the_search_between_a_short_period_and_cheap_borders_misses_nothing(
    nodes: list[tuple[int, int]], microbatches: int
) -> None:
    """Transfers as long as computing: many ways to cut are neither of shortest period nor of least sum."""
    made = [CostNode(name="n0", forward_us=nodes[0][0], output_bytes=nodes[0][1])]
    for index, (time_us, nbytes) in enumerate(nodes[1:], 1):
        made.append(CostNode(name=f"n{index}", forward_us=time_us, output_bytes=nbytes, inputs=(f"n{index - 1}",)))
    problem = PartitionProblem(
        graph=CostGraph(nodes=tuple(made)),
        devices=tuple(DeviceSpec(name=f"d{index}") for index in range(3)),
        links=LinkSpec(bytes_per_us=1.0),
        cost_model=CostModel(microbatches=microbatches),
    )
    steps = [measured(problem, placed).step.step_us for _, placed in contiguous_placements(problem)]
    links = problem.links_between(problem.devices)
    found = ContiguousStages(UnitSequence(problem.units), problem.devices, links, problem.cost_model).solve()
    assert found is not None
    assert found.step_us == pytest.approx(min(steps), rel=1e-9)
