"""A cost graph as the algorithms see it: units of nodes that stay together, numbered, and the values between them.

Some nodes must not be in a later stage than others, though no value says so (`CostNode.not_before`). Those form edges
like the values do. So do those between the readers of a value whose gradient is a sum of three or more: the sum has the
model's own bits only if later readers add to it first, as they do in the model. Where edges go in a circle, all nodes
of the circle are one unit, so that whichever way an algorithm cuts units in an order that respects the edges, every
stage can be made. A node that takes an element out of a tuple is in a circle with the node that makes the tuple.

An input of the model is given to every stage that reads it and never crosses a border; in the mapping, placeholders
stand with the first stage. The output node stands with the last stage, so a result that is made earlier is handed
through. A ``get_attr`` node belongs to the nodes that read it: its parameter counts in each of their stages and never
crosses a border.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from torch_lms.errors import PartitionError
from torch_lms.partition.circles import circles, in_order
from torch_lms.partition.costs import CostGraph, CostNode
from torch_lms.partition.working_space import node_space_bytes

__all__ = ["Units", "Value", "check_partition"]

MODEL_INPUT = -1


@dataclass(frozen=True)
class Value:
    """An output that other nodes read.

    Attributes:
        producer: unit that makes it; -1 for an input of the model.
        consumers: units that read it; the number of units stands for the model's output.
        forward_bytes: what it weighs on the way forward.
        backward_bytes: what its gradient weighs.
        storages: ids, where known.
    """

    producer: int
    consumers: tuple[int, ...]
    forward_bytes: int
    backward_bytes: int
    storages: tuple[str, ...]


class Units:
    """The active nodes of a graph, in groups that stay together, numbered from 0 in the graph's order.

    Attributes:
        graph: that they come from.
        members: of each unit the names of its nodes.
        nodes: of each unit its nodes, added up under the first one's name.
        parameters: names that each unit reads, with those of its ``get_attr`` inputs.
        inputs: numbers of the units that must not be in a later stage than each unit: those that it reads, and others.
        users: the other way round.
        values: what may cross a border.
    """

    def __init__(self, graph: CostGraph) -> None:
        self.graph = graph
        self._by_name = {node.name: node for node in graph.nodes}
        before = self._edges()
        self.members = in_order(circles(before), before)
        self._number = {name: number for number, names in enumerate(self.members) for name in names}
        self.nodes = [_together([self._by_name[name] for name in names]) for names in self.members]
        self.parameters = [self.parameters_of(names) for names in self.members]
        self.inputs: list[tuple[int, ...]] = [
            tuple(dict.fromkeys(self._number[source] for name in names for source in before[name]))
            for names in self.members
        ]
        self.inputs = [tuple(one for one in inputs if one != unit) for unit, inputs in enumerate(self.inputs)]
        self.users: list[list[int]] = [[] for _ in self.nodes]
        for index, inputs in enumerate(self.inputs):
            for source in inputs:
                self.users[source].append(index)
        self.values = self._values()

    def _edges(self) -> dict[str, list[str]]:
        """Of each active node those that must not be in a later stage."""
        active = [node for node in self.graph.nodes if not node.passive]
        names = {node.name for node in active}
        before = {node.name: [name for name in (*node.inputs, *node.not_before) if name in names] for node in active}
        for node in active:
            if node.element and len(node.inputs) == 1 and node.inputs[0] in names:
                before[node.inputs[0]].append(node.name)
        for one, other in self._adding_up(active):
            before[other].append(one)
        return before

    def _adding_up(self, active: Sequence[CostNode]) -> Iterator[tuple[str, str]]:
        """Pairs of active nodes that add to one gradient, of three or more, in the model's order.

        To autograd, an input that a node writes to and the node's result are one tensor.
        """
        tensor_of: dict[str, str] = {}
        readers: dict[str, list[str]] = {}
        for node in active:
            for name in node.writes:
                if name in node.inputs:
                    tensor_of[node.name] = tensor_of.get(name, name)
            for name in dict.fromkeys(tensor_of.get(name, name) for name in node.inputs):
                if node.gradient_bytes and self._by_name[name].gradient_bytes:
                    readers.setdefault(name, []).append(node.name)
        for those in readers.values():
            if len(those) > 2:
                yield from itertools.pairwise(those)

    def __len__(self) -> int:
        return len(self.nodes)

    @cached_property
    def chain(self) -> bool:
        """Whether each unit reads the one before it, so that there is only one order."""
        return all(unit in (0, *(source + 1 for source in inputs)) for unit, inputs in enumerate(self.inputs))

    @cached_property
    def forward_us(self) -> NDArray[np.float64]:
        """Of each unit."""
        return np.array([node.forward_us for node in self.nodes], dtype=np.float64)

    @cached_property
    def backward_us(self) -> NDArray[np.float64]:
        """Of each unit."""
        return np.array([node.backward_us for node in self.nodes], dtype=np.float64)

    def two_parts_us(self, input_share: float) -> NDArray[np.float64]:
        """Of each unit's backward in two parts, that of inputs and that of weights.

        Args:
            input_share: of the whole, what the first one takes where nothing was measured.
        """
        parts = [
            (node.backward_us * input_share, node.backward_us * (1 - input_share))
            if node.input_backward_us is None or node.weight_backward_us is None
            else (node.input_backward_us, node.weight_backward_us)
            for node in self.nodes
        ]
        return np.array(parts, dtype=np.float64).reshape(-1, 2).T

    @cached_property
    def time_us(self) -> NDArray[np.float64]:
        """Forward and backward of each unit."""
        return self.forward_us + self.backward_us

    @cached_property
    def transient_bytes(self) -> NDArray[np.float64]:
        """Working space of each unit: of its largest node."""
        space = node_space_bytes(self.graph)
        return np.array([max(space[name] for name in names) for names in self.members], dtype=np.float64)

    def stages_of_nodes(self, stage_of_unit: Sequence[int], stages: int) -> dict[str, int]:
        """The stage of every node of the graph, active or not."""
        placed = {name: int(stage_of_unit[index]) for name, index in self._number.items()}
        users: dict[str, list[int]] = {}
        for node in self.graph.nodes:
            for name in node.inputs:
                if self._by_name[name].kind == "get_attr":
                    users.setdefault(name, []).append(placed.get(node.name, stages - 1))
        everywhere = {"placeholder": 0, "output": stages - 1}
        return {
            node.name: placed[node.name]
            if node.name in placed
            else everywhere.get(node.kind, min(users.get(node.name, [0])))
            for node in self.graph.nodes
        }

    def number_of(self, name: str) -> int:
        """The unit of an active node."""
        return self._number[name]

    def parameters_of(self, members: Sequence[str]) -> tuple[str, ...]:
        """Names that some nodes read, with those of their ``get_attr`` inputs."""
        nodes = [self._by_name[name] for name in members]
        read = [self._by_name[name] for node in nodes for name in node.inputs]
        holders = [*nodes, *(node for node in read if node.kind == "get_attr")]
        return tuple(dict.fromkeys(name for node in holders for name in node.parameters))

    def _values(self) -> list[Value]:
        consumers: dict[str, list[int]] = {}
        for node in self.graph.nodes:
            for name in dict.fromkeys(node.inputs):
                reader = self._number.get(node.name, len(self.nodes))
                if reader != self._number.get(name):
                    consumers.setdefault(name, []).append(reader)
        return [
            Value(
                producer=self._number.get(node.name, MODEL_INPUT),
                consumers=tuple(dict.fromkeys(consumers[node.name])),
                forward_bytes=node.output_bytes,
                backward_bytes=node.gradient_bytes,
                storages=node.output_storages,
            )
            for node in self.graph.nodes
            if node.kind not in ("get_attr", "output") and node.name in consumers
        ]


def _together(nodes: list[CostNode]) -> CostNode:
    """The nodes of a unit as one, under the first one's name; as working space counts that of the largest."""
    if len(nodes) == 1:
        return nodes[0]
    largest = max(nodes, key=lambda node: node.output_bytes + node.gradient_bytes)
    return replace(
        nodes[0],
        forward_us=sum(node.forward_us for node in nodes),
        backward_us=sum(node.backward_us for node in nodes),
        input_backward_us=_sum_of_known(node.input_backward_us for node in nodes),
        weight_backward_us=_sum_of_known(node.weight_backward_us for node in nodes),
        output_bytes=largest.output_bytes,
        gradient_bytes=largest.gradient_bytes,
        parameters=tuple(dict.fromkeys(name for node in nodes for name in node.parameters)),
        saved=tuple(dict.fromkeys(id_ for node in nodes for id_ in node.saved)),
    )


def _sum_of_known(times_us: Iterable[float | None]) -> float | None:
    times = list(times_us)
    return None if None in times else sum(time for time in times if time is not None)


def check_partition(graph: CostGraph, stage_of: Mapping[str, int], stages: int) -> None:
    """Checks that each node has one stage, each stage has work, and no value goes back to an earlier stage.

    Raises:
        PartitionError: naming the node, the edge or the stage that is wrong.
    """
    for node in graph.nodes:
        stage = stage_of.get(node.name)
        if stage is None or not 0 <= stage < stages:
            raise PartitionError(
                f"expected a stage from 0 to {stages - 1} for node {node.name!r}, found {stage}; place every node"
            )
    unknown = sorted(set(stage_of) - {node.name for node in graph.nodes})
    if unknown:
        raise PartitionError(f"expected only nodes of the graph, found {unknown[0]!r}; leave it out")
    _check_borders(graph, stage_of)
    idle = sorted(set(range(stages)) - {stage_of[node.name] for node in graph.nodes if not node.passive})
    if idle:
        raise PartitionError(
            f"expected work for each of {stages} stages, found none for stage {idle[0]}; use fewer stages"
        )


def _check_borders(graph: CostGraph, stage_of: Mapping[str, int]) -> None:
    between: dict[tuple[int, int], tuple[str, str]] = {}
    for node in graph.nodes:
        for name in node.not_before:
            if stage_of[name] > stage_of[node.name]:
                raise PartitionError(
                    f"expected {node.name!r} in no earlier stage than {name!r}, since one of them works in place on "
                    f"memory that both use, found stages {stage_of[node.name]} and {stage_of[name]}; put them into one"
                )
        for name in node.inputs:
            between.setdefault((stage_of[name], stage_of[node.name]), (name, node.name))
    for (source, target), (made, read) in sorted(between.items()):
        if source <= target:
            continue
        circle = between.get((target, source))
        also = f", while {circle[1]!r} reads {circle[0]!r} the other way: a cycle through the border" if circle else ""
        raise PartitionError(
            f"expected values to go to the same or a later stage, found {made!r} of stage {source} read by {read!r} of "
            f"stage {target}{also}; move {read!r} to stage {source} or later"
        )
