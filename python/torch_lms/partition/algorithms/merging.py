"""The RFC's bottom-up merging: each node is a part, and parts are merged if that lowers the cost.

Source: RFC Model Partitioning in Pipeline Parallelism, "Approach that enables more possibility of balanced
partitioning", second point: start with each node as a partition, merge "if it lowers the cost, use BFS to scan the
merge order".

Note [Cost of parts]: the RFC says what one part costs ("Cost calculation") and leaves open what several do and how
transfers count ("How do we collect the communication costs?"). Here it is what the pipeline waits for at each
microbatch, the largest part's cost but at least an even share for each device, and the transfers of activations and
gradients over all borders, on the slowest link, as a share of the whole graph's time in a step. So a merge within an
even share lowers the cost by the transfer that it saves, and one beyond lowers it only where that is more than the
rise. A merge that leaves the cost as it is counts too, since it leaves a border less.

The scan goes over the parts in breadth-first order until no merge lowers the cost. A part is merged only with the next
one of that order, so that no merge ever makes a cycle. The RFC maps each part to one device: merging ends at one part
for each device, and where more are left by then, the merges that raise the cost least come next.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from torch_lms.partition.interface import Partition, PartitionProblem, evaluate
from torch_lms.partition.layers import rfc_costs
from torch_lms.partition.sequence import UnitSequence

__all__ = ["BottomUpMerging", "Merging"]

Array = NDArray[np.float64]
_ROUNDING = 1e-12


class BottomUpMerging:
    """Merges neighbours of a breadth-first order, where that lowers the cost and until there is a device for each."""

    name = "merging"
    source = "RFC Model Partitioning in Pipeline Parallelism, partitioning with a bottom up approach"

    def partition(self, problem: PartitionProblem) -> Partition:
        """See the class."""
        units, model = problem.units, problem.cost_model
        sequence = UnitSequence(units, problem.orders.get("breadth-first", problem.orders["given"]))
        merging = Merging(rfc_costs(units, model)[sequence.order], _border_costs(problem, sequence), problem.stages)
        merging.scan()
        lowered = len(units) - merging.parts
        merging.force()
        reason = (
            f"of {len(units)} nodes in breadth-first order, {lowered} merged since that lowers the cost and "
            f"{len(units) - problem.stages - lowered} to leave a part for each device"
        )
        return evaluate(problem, sequence.stages(merging.cuts()), algorithm=self.name, reason=reason)


def _border_costs(problem: PartitionProblem, sequence: UnitSequence) -> list[float]:
    """Of the border behind each node but the last one; see Note [Cost of parts]."""
    step_us = problem.cost_model.microbatches * float(problem.units.time_us.sum())
    links = problem.links_between(problem.devices)
    if not links or step_us <= 0:
        return [0.0] * (len(sequence) - 1)
    sizes = zip(sequence.cut_forward_bytes[1:-1], sequence.cut_backward_bytes[1:-1], strict=True)
    return [max(link.transfer_us(sent) + link.transfer_us(back) for link in links) / step_us for sent, back in sizes]


class Merging:
    """Parts in a row, at first one for each node; see Note [Cost of parts].

    Args:
        costs: of each node.
        borders: the cost of what goes over the border behind each node but the last one.
        devices: how many there are.
    """

    def __init__(self, costs: Sequence[float] | Array, borders: Sequence[float], devices: int) -> None:
        self._devices = devices
        self._costs = [float(cost) for cost in costs]
        self._borders = [float(cost) for cost in borders]
        self._starts = list(range(len(costs)))
        self._largest = max([sum(self._costs) / devices, *self._costs])

    @property
    def parts(self) -> int:
        """How many are left."""
        return len(self._costs)

    def cuts(self) -> list[int]:
        """The first node of each part but the first one."""
        return self._starts[1:]

    def cost(self) -> float:
        """Of all parts, relative to the whole graph's."""
        return self._largest + sum(self._borders)

    def scan(self) -> None:
        """Goes over the parts again and again, until no merge with the next part lowers the cost."""
        before = self.parts + 1
        while self._devices < self.parts < before:
            before = self.parts
            self._scan_once()

    def force(self) -> None:
        """Merges down to a part for each device; the least rise first, of equal ones the first in order."""
        while self.parts > self._devices:
            both = np.array(self._costs[:-1]) + np.array(self._costs[1:])
            rises = np.maximum(both, self._largest) - np.array(self._borders)
            part = int(rises.argmin())
            self._largest = max(self._largest, float(both[part]))
            self._costs[part : part + 2] = [float(both[part])]
            del self._borders[part], self._starts[part + 1]

    def _scan_once(self) -> None:
        costs, borders, starts = self._costs[:1], [], self._starts[:1]
        left = self.parts
        for cost, border, start in zip(self._costs[1:], self._borders, self._starts[1:], strict=True):
            largest = max(self._largest, costs[-1] + cost)
            if left > self._devices and largest - self._largest <= border + _ROUNDING:
                costs[-1] += cost
                self._largest = largest
                left -= 1
            else:
                costs.append(cost)
                borders.append(border)
                starts.append(start)
        self._costs, self._borders, self._starts = costs, borders, starts
