"""The working space of each node of a graph in its place: `node_space_bytes`.

Note [Working space]: while a node runs forward there is what it needs by itself, and each value before it that nothing
keeps for the backward and that a node from it on still reads. While its backward runs there is what that needs by
itself, and the gradients that others have begun to add up: of each value before it that a node behind it reads. Both
are counted over the whole graph, so that a value that crosses a border counts here as well as among what a stage
holds; gradients that come from outside of the model are not. Where a node was not measured its output and its output's
gradient stand for all that.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from torch_lms.partition.costs import CostGraph, CostNode

__all__ = ["node_space_bytes"]


def node_space_bytes(graph: CostGraph) -> dict[str, float]:
    """Of each node, in forward or backward, whichever is more; see Note [Working space]."""
    values, gradients = _values_beside(graph), _gradients_beside(graph)
    return {node.name: _space(node, *beside) for node, *beside in zip(graph.nodes, values, gradients, strict=True)}


def _space(node: CostNode, values: float, gradients: float) -> float:
    if node.forward_working_bytes is None or node.backward_working_bytes is None:
        return float(node.output_bytes + node.gradient_bytes)
    pairs = (values, node.forward_working_bytes), (gradients, node.backward_working_bytes)
    return max(beside + own if own else 0.0 for beside, own in pairs)  # what needs nothing is nowhere the worst place


def _values_beside(graph: CostGraph) -> NDArray[np.float64]:
    """Of the values that no node keeps for the backward, those that are there when each node begins its forward."""
    saved = {id_ for node in graph.nodes for id_ in node.saved}
    lives: dict[str, tuple[int, int]] = {}
    made_in = {}
    for place, node in enumerate(graph.nodes):
        made_in[node.name] = node
        for id_ in () if node.passive else node.output_storages:
            lives.setdefault(id_, (place, place))
        for id_ in (id_ for name in node.inputs for id_ in made_in[name].output_storages):
            if id_ in lives:
                lives[id_] = lives[id_][0], place
    change = np.zeros(len(graph.nodes) + 1)
    for id_, (made, last) in lives.items():
        if id_ not in saved:
            change[made + 1] += graph.storage_bytes.get(id_, 0)
            change[last + 1] -= graph.storage_bytes.get(id_, 0)
    return change.cumsum()[:-1]


def _gradients_beside(graph: CostGraph) -> NDArray[np.float64]:
    """Of the values before each node, the gradients that are there when its backward begins."""
    last, handing_out = {}, _handing_out(graph)
    for place, node in enumerate(graph.nodes):
        if node.gradient_bytes and node.name not in handing_out:
            last.update(dict.fromkeys(node.inputs, place))
    change = np.zeros(len(graph.nodes) + 1)
    for place, node in enumerate(graph.nodes):
        if not node.passive and last.get(node.name, place) > place:
            change[place + 1] += node.gradient_bytes
            change[last[node.name]] -= node.gradient_bytes
    return change.cumsum()[:-1]


def _handing_out(graph: CostGraph) -> set[str]:
    """Nodes that only put together what the model returns; most of that, such as logits, has no gradient."""
    by_name = {node.name: node for node in graph.nodes}
    read = {name for node in graph.nodes if node.kind != "output" for name in node.inputs}
    returned = {name for node in graph.nodes if node.kind == "output" for name in node.inputs} - read
    return {
        name
        for name in returned
        if {*by_name[name].output_storages}
        <= {id_ for one in by_name[name].inputs for id_ in by_name[one].output_storages}
    }
