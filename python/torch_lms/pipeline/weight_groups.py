"""Zero bubble's backward of weights, from the gradients that the backward of inputs has kept.

Note [Groups of weights]: the backward of inputs, PyTorch's own, keeps the gradients at the nodes where weights meet
what came in. Then each group of weights that meet it at the same nodes has a backward of its own. That is right only
while each group has one node: from two nodes it runs through all between them, which other groups then find freed, and
PyTorch 2.13 may put a weight into two groups, where its gradient counts twice. And a segment that is computed again
would be so for each group. Then all groups run as one, and what comes to a node from another gives way to the gradient
that was kept. That run goes through the backward of inputs once more: a stage's microbatch took 1.4 times as long where
it was not needed.

Note [As they were kept]: PyTorch 2.11 adds up the gradients that a node has of several outputs, and copies that of one
(it adds it to 0): of a transformer's block, 6 more passes over values in each backward. So the groups run here.

Note [Weights that are sent on]: a weight may meet what came in no sooner than in Exit, where its value leaves the
stage. PyTorch lets go of a stage's outputs after the backward of inputs, and a node of a Python function does not live
by its name alone. So the outputs are held until the backward of weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["Outputs", "backward_of_weights", "merge_groups"]


class Outputs:
    """Of one forward of a stage; see Note [Weights that are sent on]."""

    def __init__(self, outputs: Any) -> None:
        outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        found = [value for value in outputs if isinstance(value, torch.Tensor) and value.grad_fn is not None]
        self._ends = [value.grad_fn for value in found]
        self._held = [value.view_as(value) for value in found]  # PyTorch detaches the outputs themselves in place

    def live_as_long_as(self, groups: list[dict[str, Any]]) -> None:
        """Has the groups of weights hold them if one of them begins there."""
        if any(node in self._ends for group in groups for node in group["intermediates"]):
            groups[0]["outputs"] = self._held


def merge_groups(groups: list[dict[str, Any]], *, recomputes: bool) -> list[dict[str, Any]]:
    """The same groups of weights, or all as one where they have to be; see Note [Groups of weights].

    Args:
        groups: of torch.distributed.pipelining: ``params``, ``intermediates`` and, for each of these, ``grads``.
        recomputes: whether the stage computes segments again.
    """
    if not recomputes and all(len(group["intermediates"]) == 1 for group in groups):
        return groups
    kept: dict[Any, Any] = {}
    for group in groups:
        kept.update(_kept_of(group))
    params = set().union(*(group["params"] for group in groups))
    return [{"params": params, "intermediates": list(kept), "grads": list(kept.values())}]


def backward_of_weights(groups: list[dict[str, Any]]) -> None:
    """Adds the gradients of weights to what they have.

    Args:
        groups: as `merge_groups` gives them; they are emptied one after the other, so that what was kept goes.
    """
    from torch.autograd.graph import GradientEdge

    while groups:
        group = groups.pop(0)
        edges, kept, hooks = [], [], []
        for node, gradients in _kept_of(group):
            # Whatever comes there from other nodes, or hooks on values make of it once more.
            hooks.append(node.register_prehook(lambda _, kept=gradients: kept))
            for output, gradient in enumerate(gradients):
                if gradient is not None:
                    edges.append(GradientEdge(node, output))
                    kept.append(gradient)
        try:
            if edges:
                torch.autograd.backward(edges, kept, inputs=[GradientEdge(one, 0) for one in group["params"]])
        finally:
            for hook in hooks:
                hook.remove()


def _kept_of(group: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """The nodes that a backward of inputs came to, each with what it kept there."""
    gradients = group.get("grads") or [None] * len(group["intermediates"])
    return [pair for pair in zip(group["intermediates"], gradients, strict=True) if pair[1] is not None]
