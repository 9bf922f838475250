"""Predicted steps where devices have less memory than the stages want: plain cuts, checkpoints everywhere, and relief.

The graphs are those of ``partition_balance`` that come from formulas. A cap is a share of what the largest stage takes
where memory does not matter. Nothing here was run on a device.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.partition_balance import problem_of
from benchmarks.results import Result
from tests.partition.graphs import GRAPHS
from torch_lms.errors import PartitionError
from torch_lms.partition import (
    KEEP_ALL,
    Choice,
    CostGraph,
    LinkSpec,
    MemoryRelief,
    RecomputeAndSwap,
    Relieved,
    StageNeed,
    partition,
)

STAGES = 4
SHARES = (0.7, 0.5, 0.35)
HOST = LinkSpec(bytes_per_us=5.5e4, latency_us=10.0)  # PCIe 5, 55 GB/s
COLUMNS = [
    ("graph", "Model", "{}"),
    ("share", "Memory", "{:.0%}"),
    ("plain", "Plain cut", "{:.3f}"),
    ("checkpoints", "Checkpoints everywhere", "{:.3f}"),
    ("recompute", "Recompute", "{:.3f}"),
    ("swap", "Recompute and swap", "{:.3f}"),
    ("dawnpiper", "The same by dawnpiper", "{:.3f}"),
]


@dataclass(frozen=True)
class CheckpointsEverywhere:
    """Stages without room compute all of their segments again, as a user would who wraps every layer."""

    host_link: LinkSpec | None = None
    swap_last: bool = False

    def relieve(self, need: StageNeed, usable_bytes: Any) -> Relieved:
        """See the class."""
        least = need.static_bytes + need.transient_bytes
        return RecomputeAndSwap().relieve(need, np.where(need.memory_bytes > usable_bytes, least, np.inf))

    def ways(self, needs: Mapping[int, StageNeed]) -> Sequence[Sequence[Choice]]:
        """All at once."""
        return [way[-1:] for way in RecomputeAndSwap().ways(needs)]


WAYS: dict[str, tuple[str, MemoryRelief]] = {
    "plain": ("dp", KEEP_ALL),
    "checkpoints": ("dp", CheckpointsEverywhere()),
    "recompute": ("dp", RecomputeAndSwap()),
    "swap": ("dp", RecomputeAndSwap(host_link=HOST)),
    "dawnpiper": ("dawnpiper", RecomputeAndSwap(host_link=HOST)),
}


def add_graph(result: Result, name: str, graph: CostGraph) -> None:
    """A row for each share; ways by which nothing fits are left empty."""
    roomy = partition(problem_of(graph, STAGES), "dp")
    for share in SHARES:
        tight = problem_of(graph, STAGES, int(max(roomy.stage_memory_bytes) * share / 0.9))
        steps: dict[str, float] = {}
        for way, (algorithm, relief) in WAYS.items():
            cost = replace(tight.cost_model, relief=relief)
            try:
                steps[way] = partition(replace(tight, cost_model=cost), algorithm).step_us / roomy.step_us
            except PartitionError:
                continue
        result.add(graph=name, share=share, **steps)


def main() -> None:
    """Fills the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="benchmarks/results")
    given = parser.parse_args()
    title = f"Predicted step of 1F1B on {STAGES} devices with too little memory, over that with enough"
    result = Result(name="partition_relief", title=title, columns=COLUMNS)
    for name, make in GRAPHS.items():
        add_graph(result, name, make())
    result.write(given.output)


if __name__ == "__main__":
    main()
