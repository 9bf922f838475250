"""What each stage keeps for zero bubble's backward of weights, and what its backward of inputs frees.

Note [Meetings]: the backward of inputs goes from a stage's outputs to the values that came in. A node keeps the
gradient of its output if it has one of these values before it, and reads trainable parameters or what is made of
nothing else in the stage. Its output's gradient is what was measured (`CostNode.kept_gradient_bytes`). What the stage
saves stays where a later node of it reads trainable parameters, or the same one does; all else the backward of inputs
frees, but for what crosses the borders. Of that the gradients are kept as well: those that came in from the stage
behind, so that a last node's, or a last sum's, may count twice, and those that it has made for the stage before. The
first stage has no gradients of inputs: its whole backward is that of weights, and all stays until then.

Here a node's place is its position in an order, or the number of its stage; gradients go through no other nodes than
those that need one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from torch_lms.partition.costs import CostNode
from torch_lms.partition.units import Units

__all__ = ["Meeting", "WeightGradients"]

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Meeting:
    """A gradient that a stage keeps if it has the place ``at`` and begins after ``after``, but no later than ``until``.

    Attributes:
        unit: of the node.
        at: its place.
        after: of the first node whose gradient comes through this one.
        until: where the last of the weights is that meet values there.
        nbytes: of the gradient.
    """

    unit: int
    at: int
    after: int
    until: int
    nbytes: int


class WeightGradients:
    """The way of gradients through units with places.

    Args:
        units: of the graph.
        places: of each unit; none before that of its inputs.
    """

    def __init__(self, units: Units, places: Ints) -> None:
        self._units = units
        latest: dict[str, str] = {}  # whose output a value is, once a node has worked on it in place
        self._nodes: list[CostNode] = []
        self._inputs: dict[str, list[str]] = {}
        self._place: dict[str, int] = {}
        for node in units.graph.nodes:
            if node.passive:
                continue
            read = [latest.get(name, name) for name in node.inputs]
            latest.update(dict.fromkeys(node.writes, node.name))
            self._place[node.name] = int(places[units.number_of(node.name)])
            if node.gradient_bytes:
                self._nodes.append(node)
                self._inputs[node.name] = [name for name in read if name in self._inputs]
        self._weighs = {node.name for node in self._nodes if self._reads_weights(node)}

    def _reads_weights(self, node: CostNode) -> bool:
        return any(map(self._units.graph.is_trainable, self._units.parameters_of([node.name])))

    @cached_property
    def _first(self) -> dict[str, int]:
        """The first place that each node's gradient goes to."""
        found: dict[str, int] = {}
        for node in self._nodes:
            found[node.name] = min([self._place[node.name], *(found[name] for name in self._inputs[node.name])])
        return found

    def meetings(self) -> Iterator[Meeting]:
        """Of all nodes; see Note [Meetings]."""
        for node in self._nodes:
            unit, at, after = self._units.number_of(node.name), self._place[node.name], self._first[node.name]
            kept = node.gradient_bytes if node.kept_gradient_bytes is None else node.kept_gradient_bytes
            if node.name in self._weighs and kept:
                yield Meeting(unit, at, after, at, kept)
            else:
                last = max((self._first[name] for name in self._inputs[node.name]), default=after)
                yield Meeting(unit, at, after, last, node.gradient_bytes)

    def stays_after(self) -> dict[str, int]:
        """Of each node that saves anything the first place whose weights' gradients need it; absent where none do."""
        found: dict[str, int] = {}
        for node in reversed(self._nodes):
            if node.name in self._weighs:
                found[node.name] = self._place[node.name]
            if node.name in found:
                for name in self._inputs[node.name]:
                    found[name] = min(found.get(name, found[node.name]), found[node.name])
        return found


def kept_by_units(units: Units) -> NDArray[np.float64]:
    """What each unit keeps at most, wherever the stages are cut."""
    kept = np.zeros(len(units))
    for one in WeightGradients(units, np.arange(len(units))).meetings():
        if one.after < one.until:
            kept[one.unit] += one.nbytes
    return kept
