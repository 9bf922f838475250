"""Refuses partitions, made by hand, under which an operation in place would be seen too early, too late or not at all.

What the algorithms make keeps to the constraints: they are in the graph that they cut.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx, nn

from torch_lms.errors import PartitionError
from torch_lms.profile.constraints import RANDOM, RETURNED, STATISTICS, Constraint, find_constraints

__all__ = ["check_order"]


def check_order(graph: fx.Graph, modules: Mapping[str, nn.Module], stage_of: Mapping[fx.Node, int]) -> None:
    """Checks what orders nodes besides the graph's edges.

    Raises:
        PartitionError: naming both nodes.
    """
    for one in find_constraints(graph, modules):
        if stage_of[one.first] > stage_of[one.then]:
            raise PartitionError(_explain(one, stage_of))


def _explain(one: Constraint, stage_of: Mapping[fx.Node, int]) -> str:
    first, then = (
        f"{one.first.name!r} in stage {stage_of[one.first]}",
        f"{one.then.name!r} in stage {stage_of[one.then]}",
    )
    if one.why == RETURNED:
        return (
            f"expected {one.then.name!r}, which makes what the model returns, in the last stage, found {first} and "
            f"{then}; move {one.then.name!r} there"
        )
    if one.why == STATISTICS:
        return (
            f"expected all calls of {one.then.target!r}, which updates running statistics or other buffers, in one "
            f"stage, found {first} and {then}; put them into one stage"
        )
    if one.why == RANDOM:
        return (
            f"expected {one.first.name!r} in no later stage than {one.then.name!r}, since both draw random numbers and "
            f"it does so first, found {first} and {then}; keep what draws in the order of the program"
        )
    assert one.writer is not None
    return (
        f"expected {one.first.name!r} in no later stage than {one.then.name!r}, since {one.writer.name!r} works in "
        f"place on memory that they share, found {first} and {then}; put them into one stage, or change the model to "
        "not work in place"
    )
