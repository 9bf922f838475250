"""Random cost graphs, and problems on them, for property tests."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from torch_lms.partition import CostGraph, CostModel, CostNode, DeviceSpec, LinkSpec, PartitionProblem
from torch_lms.partition.figures import Figures, measure
from torch_lms.partition.sequence import UnitSequence

__all__ = ["contiguous_placements", "graphs", "make_graph", "measured", "problems"]


def make_graph(seed: int, nodes: int) -> CostGraph:
    """A graph with branches, skips, tied parameters, shared storages, unused inputs and dead ends."""
    draw, draw_kept, draw_parts = (random.Random(seed + more) for more in range(3))
    in_parts, draw_space = draw_parts.random() < 0.5, random.Random(seed + 3)
    measured = draw_space.random() < 0.5
    made = [
        CostNode(
            name=f"in{index}", kind="placeholder", output_bytes=draw.randint(1, 60), output_storages=(f"i{index}",)
        )
        for index in range(draw.randint(1, 3))
    ]
    made.append(CostNode(name="table", kind="get_attr", parameters=("p0",), output_bytes=99))
    parameters = {f"p{index}": draw.randint(1, 1000) for index in range(nodes // 2 + 1)}
    storages = {f"s{index}": draw.randint(1, 200) for index in range(nodes)} | {f"i{index}": 60 for index in range(3)}
    names = [node.name for node in made]
    for index in range(nodes):
        near = names[-4:] if draw.random() < 0.8 else names
        saved = [f"s{draw.randint(max(index - 4, 0), index)}" for _ in range(draw.randint(0, 2))]
        saved += ["i0"] * (draw.random() < 0.2)
        made.append(
            CostNode(
                name=f"n{index}",
                forward_us=draw.choice([0.0, draw.random() * 10]),
                backward_us=draw.random() * 20,
                input_backward_us=draw_parts.random() * 12 if in_parts else None,
                weight_backward_us=draw_parts.choice([0.0, draw_parts.random() * 12]) if in_parts else None,
                forward_working_bytes=draw_space.randint(0, 300) if measured else None,
                backward_working_bytes=draw_space.randint(0, 300) if measured else None,
                output_bytes=draw.choice([0, draw.randint(1, 300)]),
                gradient_bytes=draw.choice([0, draw.randint(1, 300)]),
                kept_gradient_bytes=draw_kept.choice([None, 0, draw_kept.randint(1, 300)]),
                parameters=tuple({f"p{draw.randint(0, nodes // 2)}" for _ in range(draw.randint(0, 2))}),
                saved=tuple(dict.fromkeys(saved)),
                inputs=tuple(dict.fromkeys(draw.choice(near) for _ in range(draw.randint(0, 3)))),
                module=draw.choice(["", f"blocks.{index // 3}", f"blocks.{index // 3}.mlp", "head"]),
                output_storages=(f"s{index}",) if draw.random() < 0.8 else (),
            )
        )
        names.append(f"n{index}")
        if draw.random() < 0.1:
            made += [_element(f"n{index}", part, draw.randint(0, 100), in_parts) for part in range(2)]
            names += [f"n{index}.{part}" for part in range(2)]
    made.append(CostNode(name="output", kind="output", inputs=tuple({names[-1], draw.choice(names[:-1])})))
    steps_us = {name: draw_parts.random() * 30 for name in parameters} if draw_parts.random() < 0.5 else None
    return CostGraph(nodes=tuple(made), parameter_bytes=parameters, storage_bytes=storages, optimizer_us=steps_us)


def _element(name: str, part: int, nbytes: int, in_parts: bool) -> CostNode:
    """A part of a node's output, which stays with the node."""
    return CostNode(name=f"{name}.{part}", inputs=(name,), forward_us=0.5, output_bytes=nbytes, gradient_bytes=nbytes,
                    input_backward_us=0.0 if in_parts else None, weight_backward_us=0.0 if in_parts else None,
                    element=True)  # fmt: skip


def graphs(smallest: int = 1, largest: int = 24) -> st.SearchStrategy[CostGraph]:
    """Random graphs by their seed and size."""
    return st.builds(make_graph, st.integers(0, 10**6), st.integers(smallest, largest))


@st.composite
def problems(
    draw: st.DrawFn,
    largest: int = 24,
    stages: int = 5,
    capped: bool = False,
    schedules: tuple[str, ...] = ("1f1b", "gpipe"),
) -> PartitionProblem:
    """Random problems without caps, or with caps around what the stages need."""
    nodes = draw(st.integers(1, largest))
    graph = make_graph(draw(st.integers(0, 10**6)), nodes)
    count = draw(st.integers(1, min(stages, nodes)))
    model = CostModel(
        schedule=draw(st.sampled_from(schedules)),
        microbatches=draw(st.integers(1, 9)),
        overlap_communication=draw(st.booleans()),
        memory_buffer=draw(st.sampled_from([0.0, 0.1])),
    )
    total = sum(graph.parameter_bytes.values()) * 4 + sum(graph.storage_bytes.values()) * 4
    devices = tuple(
        DeviceSpec(
            name=f"d{index}",
            speed=draw(st.sampled_from([1.0, 1.0, 2.0])),
            memory_cap_bytes=draw(st.integers(total // (4 * count), 2 * total // count + 1)) if capped else None,
        )
        for index in range(count)
    )
    link = LinkSpec(
        bytes_per_us=draw(st.sampled_from([10.0, 100.0, 1e5])), latency_us=draw(st.sampled_from([0.0, 1.0]))
    )
    return PartitionProblem(graph=graph, devices=devices, links=link, cost_model=model)


def contiguous_placements(problem: PartitionProblem) -> Iterator[tuple[tuple[int, ...], NDArray[np.int64]]]:
    """All ways to cut the graph's order into contiguous stages: the cuts, and the stage of each unit."""
    sequence = UnitSequence(problem.units)
    for cuts in itertools.combinations(range(1, len(problem.units)), problem.stages - 1):
        yield cuts, sequence.stages(cuts)


def measured(problem: PartitionProblem, placed: NDArray[np.int64]) -> Figures:
    """The figures of a placement on the problem's devices."""
    links = problem.links_between(problem.devices)
    return measure(problem.units, placed, problem.devices, links, problem.cost_model)
