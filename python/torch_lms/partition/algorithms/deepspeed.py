"""DeepSpeed's three ways to cut a list of layers: by their number, their parameters, or those of a type.

Source: https://www.deepspeed.ai/tutorials/pipeline/#load-balancing-pipeline-modules. The last two search by bisection
for the smallest weight of the heaviest stage with which the layers, taken greedily from the front, need no more stages
than there are.
"""

from __future__ import annotations

import re

import numpy as np

from torch_lms.errors import PartitionError
from torch_lms.partition.bisection import lightest_cuts
from torch_lms.partition.interface import Partition, PartitionProblem, evaluate
from torch_lms.partition.layers import Layers

__all__ = ["Parameters", "TypeRegex", "Uniform"]

_SOURCE = "DeepSpeed, PipelineModule, partition_method"


class Uniform:
    """The same number of layers in each stage; the first stages get one more if it does not divide."""

    name = "uniform"
    source = f"{_SOURCE}='uniform'"

    def partition(self, problem: PartitionProblem) -> Partition:
        """See the class."""
        layers = Layers.of(problem.units, problem.stages)
        each, more = divmod(len(layers), problem.stages)
        cuts = [each * stage + min(stage, more) for stage in range(1, problem.stages)]
        reason = f"{each} or {each + 1} of {len(layers)} layers in each stage"
        return evaluate(problem, layers.stages(cuts), algorithm=self.name, reason=reason)


class Parameters:
    """The smallest largest number of trainable parameter bytes."""

    name = "parameters"
    source = f"{_SOURCE}='parameters'"

    def partition(self, problem: PartitionProblem) -> Partition:
        """See the class."""
        units = problem.units
        trainable = problem.graph.trainable
        weights = np.zeros(len(units))
        seen: set[str] = set()
        for index, names in enumerate(units.parameters):
            fresh = [name for name in names if name not in seen and (trainable is None or name in trainable)]
            seen.update(fresh)
            weights[index] = sum(units.graph.parameter_bytes[name] for name in fresh)
        layers = Layers.of(units, problem.stages)
        cuts = lightest_cuts(layers.sums(weights), problem.stages)
        reason = "the heaviest stage has as few trainable parameters as layers allow"
        return evaluate(problem, layers.stages(cuts), algorithm=self.name, reason=reason)


class TypeRegex:
    """The smallest largest number of layers whose kind or module matches a regular expression, case left aside."""

    source = f"{_SOURCE}='type:[regex]'"

    def __init__(self, pattern: str) -> None:
        try:
            self._pattern = re.compile(pattern, re.IGNORECASE)
        except re.error as error:
            raise PartitionError(f"expected a regular expression after type:, found {pattern!r}: {error}") from error
        self.name = f"type:{pattern}"

    def partition(self, problem: PartitionProblem) -> Partition:
        """See the class.

        Raises:
            PartitionError: if nothing matches.
        """
        layers = Layers.of(problem.units, problem.stages)
        matches = [
            bool(self._pattern.search(node.kind) or self._pattern.search(node.module)) for node in problem.units.nodes
        ]
        weights = np.minimum(layers.sums(np.array(matches, dtype=np.float64)), 1.0)
        if not weights.any():
            raise PartitionError(
                f"expected layers that match {self.name}, found none; look at the nodes' kinds and modules"
            )
        cuts = lightest_cuts(weights, problem.stages)
        reason = f"{int(weights.sum())} of {len(layers)} layers match, spread evenly"
        return evaluate(problem, layers.stages(cuts), algorithm=self.name, reason=reason)
