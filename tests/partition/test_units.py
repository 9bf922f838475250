"""Which nodes stay together or in order, whichever way they are cut."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch_lms.partition import CostGraph, CostNode, DeviceSpec, PartitionProblem


def problem(*nodes: CostNode) -> PartitionProblem:
    return PartitionProblem(graph=CostGraph(nodes=nodes), devices=tuple(DeviceSpec(name=f"d{one}") for one in range(2)))


def op(name: str, *inputs: str, **of_node: Any) -> CostNode:
    given = {"forward_us": 1.0, "backward_us": 1.0, "output_bytes": 8, "gradient_bytes": 8, **of_node}
    return CostNode(name=name, kind="op", inputs=inputs, **given)


X = CostNode(name="x", kind="placeholder", output_bytes=8)
OUTPUT = CostNode(name="output", kind="output", inputs=("last",))


def in_one_order(found: PartitionProblem, *names: str) -> bool:
    """Whether each of these nodes is bound to the one before."""
    units = found.units
    number = {name: unit for unit, members in enumerate(units.members) for name in members}
    return all(number[one] in units.inputs[number[other]] for one, other in pairwise(names))


def test_three_that_add_to_one_gradient_keep_their_order() -> None:
    found = problem(
        X, op("h", "x"), op("a", "h"), op("b", "h"), op("c", "h"),
        op("sum", "b", "c"), op("last", "a", "sum"), OUTPUT,
    )  # fmt: skip
    assert in_one_order(found, "a", "b", "c")


def test_two_may_change_places_for_a_sum_of_two_has_the_same_bits() -> None:
    found = problem(X, op("h", "x"), op("a", "h"), op("b", "h"), op("last", "a", "b"), OUTPUT)
    assert not in_one_order(found, "a", "b")


def test_what_has_no_gradient_adds_to_none() -> None:
    found = problem(
        X, op("h", "x"), op("a", "h", gradient_bytes=0), op("b", "h"), op("c", "h"),
        op("sum", "b", "c"), op("last", "a", "sum"), OUTPUT,
    )  # fmt: skip
    assert not in_one_order(found, "a", "b")
    assert not in_one_order(found, "b", "c")


def test_readers_of_what_was_written_in_place_add_to_the_same_gradient() -> None:
    written = op("h_", "h", writes=("h",))
    found = problem(
        X, op("h", "x"), written, op("a", "h"), op("b", "h_"),
        op("sum", "b"), op("last", "a", "sum"), OUTPUT,
    )  # fmt: skip
    assert in_one_order(found, "h", "h_", "a", "b")
