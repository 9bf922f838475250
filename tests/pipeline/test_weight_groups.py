"""Zero bubble's groups of weights run by themselves where they can: as one, they go through the inputs' part again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_lms.pipeline.torch_backend import is_available
from torch_lms.pipeline.weight_groups import backward_of_weights, merge_groups

if is_available():
    from torch.distributed.pipelining._backward import stage_backward_input


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


class Both(torch.autograd.Function):
    """A node of two outputs, where a weight meets a value: of unlike shapes, so that their gradients have no sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x, weight)
        return x * weight, (x * weight).sum(0)

    @staticmethod
    def backward(ctx: Any, one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return (one + other) * weight, ((one + other) * x).sum(0)


class Meeting(torch.nn.Module):
    """Weights at nodes of one output and of two; one that is read twice, and one that nothing reads.

    Args:
        hooked: whether hooks change the gradients of values that weights meet.
    """

    def __init__(self, *, hooked: bool = False) -> None:
        super().__init__()
        self.hooked = hooked
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.scale, self.unread = (torch.nn.Parameter(torch.rand(4)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        one, other = Both.apply(first.relu(), self.scale)
        for value in (first, one) if self.hooked else ():
            value.register_hook(lambda gradient: gradient * 3)
        return self.last(one * self.scale).tanh() + other


@pytest.mark.skipif(not is_available(), reason="needs torch.distributed.pipelining")
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("hooked", [False, True])
def test_two_parts_of_a_backward_give_the_gradients_of_the_whole(recomputes: bool, hooked: bool) -> None:
    model, x = Meeting(hooked=hooked), torch.rand(3, 4)

    def gradients(one_by_one: bool) -> list[torch.Tensor | None]:
        model.zero_grad()
        for _ in range(2):  # the second time they are added to the first ones
            leaf = x.clone().requires_grad_()
            output = model(leaf)
            if one_by_one:
                _, groups = stage_backward_input([output], [torch.ones_like(output)], [leaf], model.parameters())
                merged = merge_groups(groups, recomputes=recomputes)
                backward_of_weights(merged)
                assert merged == []
            else:
                output.backward(torch.ones_like(output))
        return [leaf.grad, *(parameter.grad for parameter in model.parameters())]

    whole, parts = gradients(False), gradients(True)
    for expected, found in zip(whole, parts, strict=True):
        assert (expected is None) == (found is None)
        if expected is not None and found is not None:
            assert torch.equal(expected, found)
