"""Layers: what the algorithms made for ``nn.Sequential`` cut between.

A layer is a run of nodes of the same element of a list of modules, such as ``blocks.3``, or of the same top-level
module outside of lists. Where that gives fewer layers than stages, each node is a layer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torch_lms.partition.costs import CostModel
from torch_lms.partition.sequence import UnitSequence
from torch_lms.partition.units import Units

__all__ = ["Layers", "node_costs", "rfc_costs"]

Array = NDArray[np.float64]
_ELEMENT = re.compile(r"^(.*?\.\d+)(?:\.|$)|^(\d+)(?:\.|$)")


@dataclass(frozen=True)
class Layers:
    """Runs of units in the graph's order.

    Attributes:
        starts: the first unit of each layer.
        units: all units.
    """

    starts: NDArray[np.int64]
    units: Units

    @classmethod
    def of(cls, units: Units, stages: int) -> Layers:
        """The layers of a graph, or its nodes where the layers are too few."""
        names = [_layer_name(node.module) for node in units.nodes]
        starts = [index for index, name in enumerate(names) if index == 0 or name != names[index - 1]]
        if len(starts) < stages:
            starts = list(range(len(units)))
        return cls(np.array(starts, dtype=np.int64), units)

    def __len__(self) -> int:
        return len(self.starts)

    def sums(self, per_unit: Array) -> Array:
        """A quantity of units, summed over each layer."""
        return np.add.reduceat(per_unit, self.starts)

    def stages(self, cuts: list[int]) -> NDArray[np.int64]:
        """The stage of each unit, for cuts between layers."""
        return UnitSequence(self.units).stages([int(self.starts[cut]) for cut in cuts])


def _layer_name(module: str) -> str:
    found = _ELEMENT.match(module)
    return found.group(0).rstrip(".") if found else module.split(".", 1)[0]


def node_costs(units: Units, parameter_bytes: dict[str, float]) -> Array:
    """The memory of each unit: its parameters' cost and what it saves, each with the first unit that has it."""
    costs = np.zeros(len(units))
    seen: set[tuple[str, str]] = set()
    for index, node in enumerate(units.nodes):
        sizes = [(("parameter", name), parameter_bytes[name]) for name in units.parameters[index]]
        sizes += [(("saved", id_), units.graph.storage_bytes[id_]) for id_ in node.saved]
        for key, nbytes in sizes:
            if key not in seen:
                seen.add(key)
                costs[index] += nbytes
    return costs


def rfc_costs(units: Units, model: CostModel) -> Array:
    """The RFC's cost of each unit, from its shares of the whole graph's time and memory.

    Source: RFC Model Partitioning in Pipeline Parallelism, "Cost calculation".
    """
    sizes = node_costs(units, model.parameter_cost_bytes(units.graph))
    return model.time_weight * _shares(units.time_us) + model.memory_weight * _shares(sizes)


def _shares(amounts: Array) -> Array:
    total = amounts.sum()
    return amounts / total if total > 0 else amounts
