"""Zero bubble's groups of weights run by themselves where they can: as one, they go through the inputs' part again."""

from __future__ import annotations

from typing import Any

import pytest

from torch_lms.pipeline.torch_backend import merge_groups


def group(params: str, nodes: str) -> dict[str, Any]:
    """As of torch.distributed.pipelining, with letters for weights and nodes."""
    return {"params": set(params), "intermediates": list(nodes), "grads": [f"gradient of {node}" for node in nodes]}


def test_groups_of_one_node_each_stay_as_they_are() -> None:
    groups = [group("ab", "x"), group("c", "y")]
    assert merge_groups(groups, recomputes=False) is groups


@pytest.mark.parametrize(
    ("groups", "recomputes"),
    [
        ([group("ab", "x"), group("c", "y")], True),
        ([group("ab", "xy"), group("c", "y")], False),
    ],
)
def test_others_are_one_with_each_node_once(groups: list[dict[str, Any]], recomputes: bool) -> None:
    (found,) = merge_groups(groups, recomputes=recomputes)
    assert found["params"] == set("abc")
    kept = dict(zip(found["intermediates"], found["grads"], strict=True))
    assert kept == {"x": "gradient of x", "y": "gradient of y"}
    assert len(found["intermediates"]) == 2
