"""The balance that well-known models reach, and what large graphs get."""

from __future__ import annotations

import re

import pytest

from tests.partition.graphs import GRAPHS, amoebanet, gpt
from torch_lms.partition import (
    CostGraph,
    CostModel,
    DeviceSpec,
    LinkSpec,
    Partition,
    PartitionProblem,
    algorithm_names,
    find_algorithm,
    partition,
)
from torch_lms.partition.algorithms.dynamic import DynamicProgramming

LINK = LinkSpec(bytes_per_us=2e5, latency_us=5.0)


def problem_of(graph: CostGraph, stages: int, cap: int | None = None) -> PartitionProblem:
    devices = tuple(DeviceSpec(name=f"cuda:{index}", memory_cap_bytes=cap) for index in range(stages))
    model = CostModel(microbatches=4 * stages)
    return PartitionProblem(graph=graph, devices=devices, links=LINK, cost_model=model)


@pytest.fixture(scope="module", params=GRAPHS)
def graph(request: pytest.FixtureRequest) -> CostGraph:
    return GRAPHS[request.param]()


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_no_algorithm_has_a_shorter_step_for_known_models_and_little_is_left(
    graph: CostGraph, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages need not be even: the first may take longer than the last, whose work a step begins and ends with."""
    problem = problem_of(graph, stages)
    find_exact, found = DynamicProgramming.partition, []

    def kept(self: DynamicProgramming, given: PartitionProblem) -> Partition:
        found.append(find_exact(self, given))
        return found[-1]

    monkeypatch.setattr(DynamicProgramming, "partition", kept)  # it would find the same again, in as many seconds
    best = partition(problem)
    (exact,) = found
    for other in [exact, *(find_algorithm(name).partition(problem) for name in algorithm_names()[1:] if name != "dp")]:
        assert best.step_us <= other.step_us * (1 + 1e-9)
    gap = re.match(r"within (\d+\.\d+) % of the shortest step", exact.reason)
    assert float(gap[1]) < 10 if gap else exact.reason.startswith("the shortest step of all contiguous stages")


@pytest.mark.parametrize("name", ["uniform", "parameters", "balance_by_time"])
def test_auto_trains_under_caps_that_others_run_out_of(name: str) -> None:
    problem = problem_of(GRAPHS["ResNet-152"](), 4)
    needs = [max(find_algorithm(name).partition(problem).stage_memory_bytes) for name in ("uniform", "balance_by_time")]
    tight = problem_of(problem.graph, 4, cap=int(0.95 * min(needs) / 0.9))
    assert not find_algorithm(name).partition(tight).fits
    assert partition(tight).fits


@pytest.mark.parametrize("make", [lambda: gpt(layers=830), lambda: amoebanet(cells=285)], ids=["chain", "cells"])
def test_ten_thousand_nodes_are_balanced_too(make: object) -> None:
    problem = problem_of(make(), 8)  # type: ignore[operator]
    assert len(problem.units) > 9900
    made = find_algorithm("dp").partition(problem)
    assert made.imbalance < 1.01
