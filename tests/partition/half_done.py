"""What a stage has of a microbatch, by plain search from each node: before, while and after its backward of inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from torch_lms.partition import CostNode, PartitionProblem
from torch_lms.partition.units import Value
from torch_lms.schedules import Action

__all__ = ["bytes_of_microbatch", "on_the_way", "peak_along"]


def bytes_of_microbatch(problem: PartitionProblem, placed: np.ndarray, stage: int) -> tuple[float, float, float, float]:
    """What is held, what is kept for the backward of weights, and what of the first stays until then; and the most of
    gradients and working space while the inputs' backward goes from the last unit to the first.
    """
    graph, stages = problem.graph, problem.units.stages_of_nodes(placed.tolist(), problem.stages)
    nodes = {node.name: node for node in graph.nodes}
    flows = {node.name: node for node in graph.nodes if not node.passive and node.gradient_bytes}
    readers: dict[str, list[str]] = {name: [] for name in flows}
    for name, node in flows.items():
        for source in node.inputs:
            if source in readers:
                readers[source].append(name)
    own = [node for node in graph.nodes if not node.passive and stages[node.name] == stage]

    def reads_weights(node: CostNode) -> bool:
        held = [node, *(nodes[name] for name in node.inputs if nodes[name].kind == "get_attr")]
        return any(graph.is_trainable(name) for one in held for name in one.parameters)

    def reaches(name: str, following: Callable[[str], Iterable[str]], wanted: Callable[[str], bool]) -> bool:
        return wanted(name) or any(reaches(other, following, wanted) for other in following(name))

    def sources(name: str) -> list[str]:
        return [one for one in flows[name].inputs if one in flows]

    def has_values(name: str) -> bool:
        return reaches(name, sources, lambda one: stages[one] < stage)

    crossing = [value for value in problem.units.values if _is_kept(problem, placed, value, stage)]
    crossings = [
        (value.backward_bytes, border)
        for value in problem.units.values
        if value.producer >= 0
        for border in range(placed[value.producer], max(_readers(problem, placed, value)))
    ]
    at_borders = sum(nbytes for nbytes, border in crossings if border in (stage - 1, stage))

    def held(those: Sequence[CostNode]) -> float:
        saved = {id_ for node in those for id_ in node.saved}
        other = sum(value.forward_bytes for value in crossing if not saved.intersection(value.storages))
        return sum(graph.storage_bytes[id_] for id_ in saved) + other

    units = [unit for unit in range(len(problem.units)) if placed[unit] == stage]
    if stage == 0:
        most = max(float(problem.units.transient_bytes[unit]) for unit in units)
        return held(own), at_borders, held(own), at_borders + most
    kept_of, lasting = dict.fromkeys(units, 0.0), []
    for node in own:
        if node.name not in flows:
            continue
        if reaches(node.name, lambda one: [r for r in readers[one] if stages[r] == stage],
                   lambda one: reads_weights(flows[one])):  # fmt: skip
            lasting.append(node)
        if not has_values(node.name):
            continue
        own_kept = node.gradient_bytes if node.kept_gradient_bytes is None else node.kept_gradient_bytes
        if reads_weights(node) and own_kept:
            kept_of[problem.units.number_of(node.name)] += own_kept
        elif any(stages[one] == stage and not has_values(one) for one in sources(node.name)):
            kept_of[problem.units.number_of(node.name)] += node.gradient_bytes
    kept, most = float(at_borders), 0.0
    for unit in reversed(units):
        kept += kept_of[unit]
        counted_twice = min(kept_of[unit], problem.units.nodes[unit].gradient_bytes)
        most = max(most, kept + float(problem.units.transient_bytes[unit]) - counted_twice)
    left = min(held(lasting), held(own))  # a value may be larger than its storage
    return held(own), kept, left, max(most, kept)


def on_the_way(problem: PartitionProblem, placed: np.ndarray, stage: int) -> int:
    """What comes in from the stage before, and what goes back there."""
    over = [
        value
        for value in problem.units.values
        if value.producer >= 0 and placed[value.producer] < stage <= max(_readers(problem, placed, value))
    ]
    return sum(value.forward_bytes + value.backward_bytes for value in over)


def peak_along(
    problem: PartitionProblem, placed: np.ndarray, actions: Sequence[Action], transient: Sequence[float]
) -> float:
    """The most that a rank holds of microbatches, with the working space of what runs; each followed by itself."""
    parts = {stage: bytes_of_microbatch(problem, placed, stage) for stage in {action.stage for action in actions}}
    now: dict[tuple[int, int], float] = {}
    peak = 0.0
    for action in actions:
        held, kept, left, most = parts[action.stage]
        microbatch = action.stage, action.microbatch
        if action.kind == "F":
            now[microbatch] = held
        working = most if action.kind == "I" else transient[action.stage]
        peak = max(peak, sum(now.values()) + working + on_the_way(problem, placed, action.stage))
        if action.kind == "I":
            now[microbatch] = left + kept
        if action.kind in "BW":
            del now[microbatch]
    return peak


def _readers(problem: PartitionProblem, placed: np.ndarray, value: Value) -> set[int]:
    end = len(problem.units)
    return {problem.stages - 1 if user == end else int(placed[user]) for user in value.consumers}


def _is_kept(problem: PartitionProblem, placed: np.ndarray, value: Value, stage: int) -> bool:
    """Whether a value crosses one of a stage's borders, or is an input or an output of the model there."""
    readers = _readers(problem, placed, value)
    producer = value.producer
    if producer < 0:
        return stage in readers
    first, last = int(placed[producer]), max(readers)
    stays = problem.cost_model.outputs_stay and len(problem.units) in value.consumers
    leaves = first < last or stays
    return leaves and first <= stage <= last
