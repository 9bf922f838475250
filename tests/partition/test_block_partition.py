"""torchgpipe's block partition: its own cases, what the paper proves, and layers of a model."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.partition.graphs import chain
from torch_lms.errors import PartitionError
from torch_lms.partition import CostGraph, CostModel, CostNode, DeviceSpec, PartitionProblem, find_algorithm
from torch_lms.partition.algorithms.block import solve

numbers = st.lists(st.one_of(st.sampled_from([0, 0, 1, 5]), st.floats(0, 1)), min_size=1, max_size=30)


def layer_counts(graph: CostGraph, algorithm: str, stages: int = 2, multiplier: float = 4.0) -> list[int]:
    devices = tuple(DeviceSpec(name=f"d{index}") for index in range(stages))
    model = CostModel(optimizer_multiplier=multiplier)
    made = find_algorithm(algorithm).partition(PartitionProblem(graph=graph, devices=devices, cost_model=model))
    placed = [made.stage_of[f"n{index}"] for index in range(len(graph.nodes) - 2)]
    return [placed.count(stage) for stage in range(stages)]


def layers_of(parameter_bytes: list[int], saved_bytes: list[int]) -> CostGraph:
    """Layers one after the other with these sizes."""
    nodes = [CostNode(name="x", kind="placeholder")]
    for index in range(len(parameter_bytes)):
        nodes.append(CostNode(name=f"n{index}", forward_us=1.0, module=f"layers.{index}", inputs=(nodes[-1].name,),
                              parameters=(f"w{index}",), saved=(f"s{index}",)))  # fmt: skip
    nodes.append(CostNode(name="output", kind="output", inputs=(nodes[-1].name,)))
    return CostGraph(
        nodes=tuple(nodes),
        parameter_bytes={f"w{index}": nbytes for index, nbytes in enumerate(parameter_bytes)},
        storage_bytes={f"s{index}": nbytes for index, nbytes in enumerate(saved_bytes)},
    )


def test_torchgpipes_own_cases() -> None:
    assert solve([1, 2, 3, 4, 5, 6], partitions=2) == [[1, 2, 3, 4], [5, 6]]
    assert solve([0, 0], partitions=2) == [[0], [0]]


@pytest.mark.parametrize(
    ("sequence", "partitions", "message"),
    [
        ([42], 0, "at least 1 partition, found 0"),
        ([42], -1, "found -1"),
        ([], 1, "0 for 1"),
        ([42], 2, "1 for 2"),
    ],
)
def test_torchgpipes_refusals(sequence: list[float], partitions: int, message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        solve(sequence, partitions)


def test_what_is_within_the_bound_at_the_start_stays() -> None:
    """Equal numbers: the last block takes the remainder, which least variance evens out."""
    assert [len(block) for block in solve([7.0] * 11, 4)] == [2, 2, 2, 5]
    assert layer_counts(chain([1.0] * 11), "balance_by_time", 4) == [2, 2, 2, 5]
    assert max(layer_counts(chain([1.0] * 11), "least_variance", 4)) == 3


def test_numbers_go_one_by_one_from_block_to_block_towards_the_smallest() -> None:
    """By hand: 0 0 | 0 1 | 4 4 gives the middle a 4, then the front 0 and 1, and 4 is within 1 + 4."""
    assert solve([0, 0, 0, 1, 4, 4], 3) == [[0, 0, 0, 1], [4], [4]]


@settings(deadline=None)
@given(sequence=numbers, data=st.data())
def test_no_block_is_empty_and_they_differ_by_no_more_than_the_range_of_the_numbers(
    sequence: list[float], data: st.DataObject
) -> None:
    parts = data.draw(st.integers(1, len(sequence)))
    blocks = solve(sequence, parts)
    assert list(itertools.chain.from_iterable(blocks)) == sequence
    assert len(blocks) == parts
    assert all(blocks)
    sizes = [sum(number - min(sequence) for number in block) for block in blocks]
    assert max(sizes) - min(sizes) <= (max(sequence) - min(sequence)) * (1 + 1e-12)


def test_rounding_does_not_send_a_number_back_and_forth() -> None:
    """Sums of a tenth round to either side of the bound; the loop ends only with exact ones."""
    blocks = solve([0.1 * (index % 7) for index in range(200)], 13)
    assert sum(len(block) for block in blocks) == 200


def test_layers_balance_as_torchgpipe_says_by_time_and_by_size() -> None:
    up, down, ones = [1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1], [0] * 6
    assert layer_counts(chain([float(number) for number in up]), "balance_by_time") == [4, 2]
    assert layer_counts(layers_of(ones, up), "balance_by_size") == [4, 2]
    assert layer_counts(layers_of(ones, down), "balance_by_size") == [2, 4]
    assert layer_counts(layers_of(up, down), "balance_by_size", multiplier=100) == [4, 2]
    assert layer_counts(layers_of(up, [600 * number for number in down]), "balance_by_size", multiplier=100) == [2, 4]
