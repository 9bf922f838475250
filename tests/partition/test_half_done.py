"""Zero bubble's microbatches between the two parts of their backward, in graphs small enough to see through."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from torch_lms.partition import CostGraph, CostModel, CostNode, DeviceSpec, PartitionProblem
from torch_lms.partition.figures import measure

NODES = (
    CostNode(name="embed", output_bytes=10, gradient_bytes=10, parameters=("w",), output_storages=("e",)),
    CostNode(name="norm", inputs=("embed",), output_bytes=10, gradient_bytes=10, parameters=("v",),
             saved=("e",), output_storages=("n",)),
    CostNode(name="head", inputs=("norm",), output_bytes=400, gradient_bytes=400, parameters=("h",), saved=("n",),
             output_storages=("h",)),
    CostNode(name="loss", inputs=("head",), output_bytes=4, gradient_bytes=4, saved=("p",)),
    CostNode(name="output", kind="output", inputs=("loss",)),
)  # fmt: skip
SIZES = {"e": 10, "n": 10, "b": 50}
FIRST, SECOND = [0, 1, 1, 1], [0, 0, 1, 1]


def memory(
    schedule: str,
    placed: list[int],
    nodes: tuple[CostNode, ...] = NODES,
    *,
    trainable: bool = True,
    loss_bytes: int = 800,
) -> tuple[int, ...]:
    graph = CostGraph(
        nodes=nodes,
        parameter_bytes=dict.fromkeys("wvh", 1),
        storage_bytes={**SIZES, "p": loss_bytes},
        trainable=None if trainable else frozenset(),
    )
    devices = tuple(DeviceSpec(name=f"d{stage}") for stage in range(1 + max(placed)))
    model = CostModel(schedule=schedule, microbatches=4, optimizer_multiplier=1.0)
    problem = PartitionProblem(graph=graph, devices=devices, cost_model=model)
    links = problem.links_between(problem.devices)
    return measure(problem.units, np.array(placed), problem.devices, links, model).stage_memory_bytes


def test_a_stage_keeps_the_gradients_of_its_weights_outputs() -> None:
    """While the second of two microbatches is in its backward of inputs, both have the gradients of what came in, of
    the norm and of the head; the first one no more has what its loss saved. The head's output is 400, beside its
    gradient, and then the norm's gradient is not yet there.
    """
    border, gradients = 10, 10 + 10 + 400
    whole, left = 10 + 10 + 800 + 4, 10 + 10 + 4
    coming = 2 * border  # and what goes back
    assert memory("zero_bubble", FIRST)[1] == 2 + whole + left + 2 * gradients + 400 - 10 + coming
    assert memory("1f1b", FIRST)[1] == 2 + 800 + whole + coming
    assert memory("zero_bubble", FIRST)[0] == 1 + 20 + 2 * border + border
    assert memory("zero_bubble", SECOND)[1] == 1 + (10 + 800 + 4) + (10 + 4) + 2 * (10 + 400) + 400 + coming


def test_with_little_to_free_a_stage_takes_most_in_its_backward_of_weights() -> None:
    """Which begins with all that the one of inputs has kept, and may need the working space of any node."""
    left, gradients = 10 + 10 + 4, 10 + 10 + 400
    assert memory("zero_bubble", FIRST, loss_bytes=8)[1] == 2 + 800 + 2 * left + 2 * gradients + 2 * 10


def test_gradients_as_measured_count_instead_of_those_of_the_output() -> None:
    deeper = tuple(replace(node, kept_gradient_bytes=25) if node.name == "norm" else node for node in NODES)
    assert memory("zero_bubble", FIRST, deeper)[1] == memory("zero_bubble", FIRST)[1] + 2 * 15 - 15


def test_frozen_weights_keep_no_gradients() -> None:
    """But those at the border; all that was saved is freed, but for what came in or goes out."""
    whole, left = 10 + 10 + 800 + 4, 10 + 4
    assert memory("zero_bubble", FIRST, trainable=False)[1] == 2 + whole + left + 2 * 10 + 800 + 2 * 10


@pytest.mark.parametrize("in_place", [False, True])
def test_what_is_read_after_it_was_changed_in_place_has_the_change_behind_it(in_place: bool) -> None:
    """The last node reads norm's output by its first name: what the change saved stays for the weights it used."""
    bias = CostNode(name="bias", inputs=("norm",), output_bytes=10, gradient_bytes=10, saved=("b",),
                    writes=("norm",) if in_place else ())  # fmt: skip
    head = replace(NODES[2], inputs=("norm", "bias")[not in_place :][:1], not_before=("bias",))
    nodes = (*NODES[:2], bias, head, *NODES[3:])
    assert memory("zero_bubble", [0, 1, 1, 1, 1], nodes)[1] == memory("zero_bubble", FIRST)[1] + 2 * 50
