"""Costs: the RFC's table and formula, memory of stages, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.partition.graphs import chain
from tests.partition.pipeline_clock import run_pipeline
from tests.partition.random_graphs import measured
from torch_lms.errors import LimitError, PartitionError
from torch_lms.partition import (
    CostGraph,
    CostModel,
    CostNode,
    DataParallel,
    DeviceSpec,
    LinkSpec,
    PartitionProblem,
    links_from_profile,
    optimizer_multiplier,
    partition,
)
from torch_lms.partition.steps import TrainingStep
from torch_lms.profile.document import LinkProfile, NodeProfile, Profile

FREE = LinkSpec()


def devices(count: int, cap: int | None = None) -> tuple[DeviceSpec, ...]:
    return tuple(DeviceSpec(name=f"cuda:{index}", memory_cap_bytes=cap) for index in range(count))


@pytest.mark.parametrize(
    ("optimizer", "options", "copies"),
    [
        ("SGD", {"lr": 0.1}, 2),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, 3),
        ("Adam", {}, 4),
        ("Adam", {"amsgrad": True}, 5),
        ("AdamW", {}, 4),
        ("Adadelta", {}, 4),
        ("Adagrad", {}, 3),
        ("RMSprop", {}, 3),
        ("RMSprop", {"momentum": 0.9, "centered": True}, 5),
    ],
)
def test_the_multiplier_of_an_optimizer_is_the_rfcs(optimizer: str, options: dict[str, float], copies: float) -> None:
    assert optimizer_multiplier(getattr(torch.optim, optimizer)([torch.zeros(1)], **options)) == copies


def test_an_optimizer_that_is_not_in_the_table_must_be_measured() -> None:
    with pytest.raises(PartitionError, match=r"expected an optimizer among .* found 'lion'"):
        optimizer_multiplier("lion")


@pytest.mark.parametrize(
    ("trainable", "measured", "expected"),
    [
        (None, None, {"a": 400.0, "b": 40.0}),
        (frozenset({"b"}), None, {"a": 100.0, "b": 40.0}),
        (None, {"a": 7}, {"a": 207.0, "b": 20.0}),
        (frozenset({"b"}), {"b": 5}, {"a": 100.0, "b": 25.0}),
    ],
)
def test_a_parameter_costs_its_copies_or_what_was_measured(
    trainable: frozenset[str] | None, measured: dict[str, int] | None, expected: dict[str, float]
) -> None:
    graph = CostGraph(nodes=(), parameter_bytes={"a": 100, "b": 10}, trainable=trainable, optimizer_bytes=measured)
    assert CostModel(optimizer_multiplier=4).parameter_cost_bytes(graph) == expected


def test_the_rfcs_cost_weighs_time_and_memory() -> None:
    assert CostModel().cost(0.5, 0.25) == pytest.approx(0.6 * 0.5 + 0.4 * 0.25)


@pytest.mark.parametrize(
    ("schedule", "microbatches", "held"), [("1f1b", 8, (4, 3, 2, 1)), ("1f1b", 2, (2, 2, 2, 1)), ("gpipe", 8, (8,) * 4)]
)
def test_microbatches_in_flight_follow_the_schedule(schedule: str, microbatches: int, held: tuple[int, ...]) -> None:
    model = CostModel(schedule=schedule, microbatches=microbatches)
    assert TrainingStep.of(["a", "b", "c", "d"], model).in_flight == held


def test_a_stages_memory_counts_what_is_shared_once() -> None:
    """Two nodes of one stage save one storage and share one parameter; the stage behind saves its own."""
    nodes = (
        CostNode(name="x", kind="placeholder", output_bytes=10, output_storages=("sx",)),
        CostNode(name="a", output_bytes=20, inputs=("x",), parameters=("w",), saved=("sx",), output_storages=("sa",)),
        CostNode(
            name="b", output_bytes=30, inputs=("a",), parameters=("w",), saved=("sa", "sx"), output_storages=("sb",)
        ),
        CostNode(name="c", output_bytes=40, inputs=("b",), parameters=("w",), saved=("sc",), output_storages=("sc",)),
        CostNode(name="out", kind="output", inputs=("c",)),
    )
    storages = {"sx": 10, "sa": 20, "sb": 30, "sc": 40}
    graph = CostGraph(nodes=nodes, parameter_bytes={"w": 100}, storage_bytes=storages)
    model = CostModel(optimizer_multiplier=3, microbatches=2)
    made = partition(PartitionProblem(graph=graph, devices=devices(2), cost_model=model), TwoAndOne())
    first = 300 + 2 * (10 + 20 + 30) + 30  # parameter, then saved and sent for two microbatches, then working space
    second = 300 + 1 * (30 + 40) + 40 + 30  # the next microbatch's is on its way
    assert made.stage_memory_bytes == (first, second)
    assert made.cut_bytes == (30,)


class TwoAndOne:
    """Cuts before the last node."""

    name = "two-and-one"
    source = "this test"

    def partition(self, problem: PartitionProblem) -> object:
        from torch_lms.partition.interface import evaluate

        return evaluate(problem, np.array([0] * (len(problem.units) - 1) + [1]), algorithm=self.name, reason="as told")


def test_a_value_that_skips_a_stage_is_carried_through_it() -> None:
    nodes = (
        CostNode(name="a", output_bytes=5, gradient_bytes=4, forward_us=1),
        CostNode(name="b", output_bytes=7, gradient_bytes=6, forward_us=1, inputs=("a",)),
        CostNode(name="c", output_bytes=9, forward_us=1, inputs=("b", "a")),
    )
    made = partition(PartitionProblem(graph=CostGraph(nodes=nodes), devices=devices(3)))
    assert made.cut_bytes == (9, 9 + 13)
    assert made.figures.cut_forward_bytes == (5, 12)


def test_inputs_of_the_model_cross_no_border() -> None:
    nodes = (
        CostNode(name="ids", kind="placeholder", output_bytes=1000),
        CostNode(name="a", output_bytes=5, forward_us=1, inputs=("ids",)),
        CostNode(name="b", forward_us=1, inputs=("a", "ids")),
    )
    made = partition(PartitionProblem(graph=CostGraph(nodes=nodes), devices=devices(2)))
    assert made.cut_bytes == (5,)
    assert made.stage_memory_bytes == (2 * 1005 + 5, 1005 + 5)


@settings(deadline=None)
@given(stages=st.integers(1, 6), microbatches=st.integers(1, 12), schedule=st.sampled_from(["1f1b", "gpipe"]))
def test_the_bubble_of_even_stages_is_the_textbooks(stages: int, microbatches: int, schedule: str) -> None:
    problem = PartitionProblem(
        graph=chain([6.0] * stages),
        devices=devices(stages),
        links=FREE,
        cost_model=CostModel(schedule=schedule, microbatches=microbatches),
    )
    made = partition(problem)
    assert made.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))


times = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=6)


def pipeline_of(
    forward: Sequence[float], backward: Sequence[float], nbytes: int = 0, link: LinkSpec = FREE, **model: Any
) -> float:
    """The step of one node in each stage."""
    nodes: list[CostNode] = []
    for index, (one, other) in enumerate(zip(forward, backward, strict=True)):
        inputs = (nodes[-1].name,) if nodes else ()
        nodes.append(CostNode(name=f"n{index}", forward_us=one, backward_us=other, inputs=inputs,
                              output_bytes=nbytes, gradient_bytes=nbytes))  # fmt: skip
    problem = PartitionProblem(
        graph=CostGraph(nodes=tuple(nodes)), devices=devices(len(nodes)), links=link, cost_model=CostModel(**model)
    )
    return measured(problem, np.arange(len(nodes))).step.step_us


@settings(deadline=None, max_examples=100)
@given(times=times, microbatches=st.integers(1, 12), schedule=st.sampled_from(["1f1b", "gpipe"]))
def test_a_step_is_what_a_clock_says(times: list[tuple[int, int]], microbatches: int, schedule: str) -> None:
    forward, backward = ([float(one) for one in column] for column in zip(*times, strict=True))
    step_us = pipeline_of(forward, backward, schedule=schedule, microbatches=microbatches)
    assert step_us == pytest.approx(run_pipeline(forward, backward, microbatches, schedule))


@settings(deadline=None, max_examples=100)
@given(times=times, microbatches=st.integers(1, 12))
def test_a_gpipe_step_is_the_closed_form(times: list[tuple[int, int]], microbatches: int) -> None:
    forward, backward = ([float(one) for one in column] for column in zip(*times, strict=True))
    closed = sum(forward) + sum(backward) + (microbatches - 1) * (max(forward) + max(backward))
    assert pipeline_of(forward, backward, schedule="gpipe", microbatches=microbatches) == pytest.approx(closed)


@pytest.mark.parametrize(("overlap", "step_us"), [(True, 2 * (3 * 3 + 2 + 3)), (False, 2 * (3 + 3 * 5))])
def test_a_device_waits_for_what_it_receives_only_without_overlap(overlap: bool, step_us: float) -> None:
    """Two stages of 3 us forward and 3 us backward, 2 us over the border each way, GPipe with three microbatches.

    With overlap: three forwards, the last transfer, the last forward, then the same way back. Without, the second stage
    takes 5 us for each forward with its transfer, and the first for each backward.
    """
    link = LinkSpec(bytes_per_us=1.0)
    words = {"schedule": "gpipe", "microbatches": 3, "overlap_communication": overlap}
    assert pipeline_of([3.0, 3.0], [3.0, 3.0], 2, link, **words) == step_us


def test_one_transfer_at_a_time_goes_over_a_link() -> None:
    """Ten microseconds a transfer and one a stage: the link is what takes the time."""
    step_us = pipeline_of([1.0, 1.0], [1.0, 1.0], 10, LinkSpec(bytes_per_us=1.0), schedule="gpipe", microbatches=5)
    assert step_us == 1 + 5 * 10 + 1 + 1 + 5 * 10 + 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CostModel(time_weight=0.7), "sum to 1"),
        (lambda: CostModel(schedule="zigzag"), "gpipe, 1f1b, interleaved, zero_bubble, found 'zigzag'"),
        (lambda: CostModel(microbatches=0), "from 1 to 65536 microbatches, found 0"),
        (lambda: CostModel(microbatches=10**12), "from 1 to 65536 microbatches, found 1000000000000"),
        (lambda: CostModel(memory_buffer=1.0), "memory buffer"),
        (lambda: CostModel(optimizer_multiplier=0.5), "multiplier of at least 1"),
        (lambda: CostModel(input_backward_share=1.5), "share of backward from 0 to 1, found 1.5"),
        (lambda: DataParallel(ranks=0), "at least 1 data-parallel rank, found 0"),
        (lambda: DataParallel(bucket_bytes=0), "buckets of at least 1 byte, found 0"),
        (lambda: DeviceSpec(name="d", speed=0.0), "positive and finite speed of d"),
        (lambda: DeviceSpec(name="d", memory_cap_bytes=0), "positive memory cap of d"),
        (lambda: LinkSpec(bytes_per_us=0.0), "positive rate"),
        (lambda: CostGraph(nodes=(CostNode(name="a"), CostNode(name="a"))), "'a' twice"),
        (lambda: CostGraph(nodes=(CostNode(name="a", inputs=("z",)),)), "found 'z'"),
        (lambda: CostGraph(nodes=(CostNode(name="a", parameters=("w",)),)), "size of parameter 'w'"),
        (lambda: CostGraph(nodes=(CostNode(name="a", saved=("s",)),)), "size of saved storage 's'"),
        (lambda: CostGraph(nodes=(CostNode(name="a", forward_us=-1.0),)), "at least 0"),
        (
            lambda: CostGraph(nodes=(CostNode(name="a", inputs=("b",)), CostNode(name="b", inputs=("a",)))),
            "found 'a' before its input 'b'; .* cycle",
        ),
    ],
)
def test_costs_that_make_no_sense_are_refused(make: object, message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(("cap", "nbytes"), [("40GiB", 40 << 30), ("1.5 GB", 1_500_000_000), (7, 7), (None, None)])
def test_a_cap_may_be_written_in_words(cap: int | str | None, nbytes: int | None) -> None:
    device = DeviceSpec(name="d", memory_cap_bytes=cap)
    assert device.memory_cap_bytes == nbytes
    assert replace(device, speed=2.0) == DeviceSpec(name="d", memory_cap_bytes=nbytes, speed=2.0)


@pytest.mark.parametrize("cap", ["40 elephants", "0GiB", "50%"])
def test_a_cap_that_is_no_size_is_refused(cap: str) -> None:
    with pytest.raises(LimitError, match="expected a size"):
        DeviceSpec(name="d", memory_cap_bytes=cap)


def profile_of(nodes: tuple[NodeProfile, ...], **changes: object) -> Profile:
    known = {
        "model": "M", "level": "operator", "notes": (), "device": "cpu", "torch_version": "2", "warmup_runs": 1,
        "timed_runs": 1, "timed": True, "nodes": nodes, "parameter_bytes": {"w": 8, "v": 24}, "tied": {"t": "w"},
        "trainable": frozenset({"w"}), "storage_bytes": {"s": 16}, "optimizer_bytes": None, "step_us": 1.0, "links": (),
    }  # fmt: skip
    return Profile(**(known | changes))  # type: ignore[arg-type]


NODES = (
    NodeProfile(name="x", op="placeholder", target="x", output_bytes=4),
    NodeProfile(name="a", op="call_module", target="a", inputs=("x", "x"), forward_us=1.0, backward_us=2.0, module="a",
                parameters=("t", "w"), saved=("s",), output_bytes=4, output_storages=("s",), kept_gradient_bytes=6),
    NodeProfile(name="b", op="call_module", target="b", inputs=("a",), parameters=("v",), output_bytes=4),
    NodeProfile(name="output", op="output", target="output", inputs=("b",)),
)  # fmt: skip


def test_a_profile_becomes_costs_with_tied_weights_under_one_name() -> None:
    graph = CostGraph.from_profile(profile_of(NODES))
    assert graph.nodes[1] == CostNode(
        name="a", forward_us=1.0, backward_us=2.0, output_bytes=4, parameters=("w",), saved=("s",), inputs=("x",),
        module="a", kind="a", output_storages=("s",), kept_gradient_bytes=6,
    )  # fmt: skip
    assert [node.kind for node in graph.nodes] == ["placeholder", "a", "b", "output"]
    assert graph.trainable == {"w"}


@pytest.mark.parametrize("name", ["placeholder", "get_attr", "output"])
def test_a_layer_computes_whatever_it_is_called(name: str) -> None:
    nodes = [replace(node, target=name) if node.op == "call_module" else node for node in NODES]
    graph = CostGraph.from_profile(profile_of(nodes))
    assert [node.passive for node in graph.nodes] == [True, False, False, True]
    assert all(name in node.kind for node in graph.nodes if not node.passive)


def test_a_profile_without_times_counts_parameters() -> None:
    graph = CostGraph.from_profile(profile_of(NODES, timed=False))
    assert graph.nodes[2].forward_us == 3 * graph.nodes[1].forward_us > 0
    assert graph.nodes[0].forward_us == 0


def test_links_come_from_the_profile_for_the_devices_that_are_used() -> None:
    measured = (
        LinkProfile(source="cuda:0", target="cuda:1", bytes_per_us=10.0, latency_us=1.0),
        LinkProfile(source="cuda:0", target="cpu", bytes_per_us=2.0, latency_us=1.0),
    )
    links = links_from_profile(profile_of(NODES, links=measured), devices(3))
    assert isinstance(links, dict)
    assert set(links.values()) == {LinkSpec(bytes_per_us=10.0, latency_us=1.0)}
    assert len(links) == 6
    assert links_from_profile(profile_of(NODES), devices(3)) == LinkSpec()
