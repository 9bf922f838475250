"""`partition`: the algorithm that was asked for, and an error where what it finds does not fit."""

from __future__ import annotations

from typing import Any

from torch_lms.errors import PartitionError
from torch_lms.partition.algorithms import find_algorithm
from torch_lms.partition.algorithms.dynamic import least_caps
from torch_lms.partition.interface import Algorithm, Partition, PartitionProblem, gib, settle

__all__ = ["check_algorithm", "partition"]

_LATE = (
    "what its stages give up frees too little in time: let segments be computed again, raise the caps, or use more "
    "stages"
)


def partition(problem: PartitionProblem, algorithm: str | Algorithm = "auto") -> Partition:
    """Cuts a graph into stages.

    Args:
        problem: the graph, the devices and the prices.
        algorithm: a name (`torch_lms.partition.algorithm_names`), ``type:`` and a regular expression, or one's own.

    Raises:
        PartitionError: for an unknown name, or if what comes out does not fit the devices; it says the least cap that
            works.
    """
    chosen = check_algorithm(algorithm)
    estimated = chosen.partition(problem)
    if not isinstance(estimated, Partition):
        raise PartitionError(
            f"expected a Partition from the algorithm {chosen!r}, found {estimated!r}; return what "
            "torch_lms.partition.interface.evaluate gives"
        )
    found = settle(problem, estimated)
    if not found.fits:
        too_late = estimated.fits or estimated.stage_relief  # the algorithm has settled that itself
        raise PartitionError(_misfit(found) + (_LATE if too_late else least_caps(problem).advice))
    return found


def check_algorithm(given: Any) -> Algorithm:
    """The algorithm that is meant.

    Args:
        given: a name, or one's own.

    Raises:
        PartitionError: for an unknown name, or what is no algorithm.
    """
    if isinstance(given, str):
        return find_algorithm(given)
    if isinstance(given, type) or not callable(getattr(given, "partition", None)):
        raise PartitionError(
            f"expected the name of an algorithm or an object with a method partition, found {given!r}; name one, such "
            "as 'auto', or make an object of a class"
        )
    chosen: Algorithm = given
    return chosen


def _misfit(found: Partition) -> str:
    figures = found.figures
    device = figures.over()[0]
    name, stages = figures.device_names[device], figures.device_stages[device]
    shown = f"stage {stages[0]}" if len(stages) == 1 else f"stages {', '.join(map(str, stages))}"
    return (
        f"expected every device with room for its stages, found {shown} of algorithm {found.algorithm!r} with "
        f"{gib(figures.device_memory_bytes[device])} where {name} has {gib(figures.usable_bytes[device])} after the "
        "buffer; "
    )
