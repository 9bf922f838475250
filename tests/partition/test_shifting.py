"""Borders that are shifted by what whole steps take, where each cut has an order of transfers of its own."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.partition.random_graphs import make_graph, measured
from torch_lms.partition import CostModel, DeviceSpec, LinkSpec, PartitionProblem, partition
from torch_lms.partition.algorithms import auto
from torch_lms.partition.sequence import UnitSequence
from torch_lms.partition.shifting import shift_borders
from torch_lms.schedules.rules import SCHEDULES


def problem_of(seed: int, schedule: str, nodes: int, cap: int | None = None) -> PartitionProblem:
    two = (DeviceSpec(name="d0", memory_cap_bytes=cap), DeviceSpec(name="d1", memory_cap_bytes=cap))
    return PartitionProblem(
        graph=make_graph(seed, nodes),
        devices=two * 2 if schedule in ("interleaved", "zero_bubble") else two,
        links=LinkSpec(bytes_per_us=20.0, latency_us=1.0),
        cost_model=CostModel(schedule=schedule, microbatches=4, memory_buffer=0.0, transfers_in_turn=True),
    )


def neighbours(problem: PartitionProblem, placed: np.ndarray) -> list[np.ndarray]:
    """With one border a unit further on or back."""
    cuts = np.searchsorted(placed, np.arange(1, problem.stages)).tolist()
    found = []
    for border, by in itertools.product(range(len(cuts)), (-1, 1)):
        near = [*cuts[:border], cuts[border] + by, *cuts[border + 1 :]]
        if all(one < other for one, other in itertools.pairwise([0, *near, len(placed)])):
            found.append(UnitSequence(problem.units).stages(near))
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), data=st.data())
def test_no_border_is_better_one_unit_on_or_back(schedule: str, seed: int, data: st.DataObject) -> None:
    problem = problem_of(seed, schedule, 14)
    count = len(problem.units)
    cuts = data.draw(
        st.lists(st.integers(1, count - 1), min_size=problem.stages - 1, max_size=problem.stages - 1, unique=True)
    )
    start = UnitSequence(problem.units).stages(sorted(cuts))
    placed, shifts = shift_borders(problem, start, problem.devices)
    before, after = measured(problem, start).step.step_us, measured(problem, placed).step.step_us
    assert after < before if shifts else (placed == start).all()
    assert all(measured(problem, one).step.step_us >= after * (1 - 2e-6) for one in neighbours(problem, placed))


def test_stages_that_fit_still_do_and_those_that_do_not_get_no_larger() -> None:
    shifted = 0
    for seed in range(30):
        free = problem_of(seed, "interleaved", 14)
        start = UnitSequence(free.units).stages([len(free.units) * stage // 4 for stage in (1, 2, 3)])
        most = max(measured(free, start).device_memory_bytes)
        for cap in (most, most // 2):
            problem = problem_of(seed, "interleaved", 14, cap)
            placed, shifts = shift_borders(problem, start, problem.devices)
            assert measured(problem, placed).excess_bytes <= measured(problem, start).excess_bytes
            shifted += shifts
    assert shifted


def test_stages_that_are_not_contiguous_stay() -> None:
    problem = problem_of(1, "1f1b", 14)
    placed = np.zeros(len(problem.units), dtype=np.int64)
    placed[1] = 1
    found, shifts = shift_borders(problem, placed, problem.devices)
    assert (shifts, found.tolist()) == (0, placed.tolist())


@pytest.mark.parametrize("in_turn", [False, True])
def test_the_planner_shifts_borders_only_where_transfers_go_in_turn(
    in_turn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = problem_of(3, "interleaved", 20)
    problem = replace(given, cost_model=replace(given.cost_model, transfers_in_turn=in_turn))
    plain = partition(problem)
    wanted = UnitSequence(problem.units).stages([4, 8, 12])
    monkeypatch.setattr(auto, "shift_borders", lambda *_: (wanted, 3))
    monkeypatch.setattr(auto, "_rank", lambda one: ("borders shifted" not in one.reason, one.step_us))
    found = partition(problem)
    assert ("then 3 borders shifted" in found.reason) == in_turn
    assert in_turn or found.stage_of == plain.stage_of
