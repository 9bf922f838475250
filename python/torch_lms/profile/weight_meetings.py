"""Where weights meet values in the backward of a node: zero bubble keeps the gradients that arrive there.

Its backward of inputs goes through a stage without the weights. What `torch.distributed.pipelining` keeps for the
backward of weights is, for each node of autograd that gets values of either kind, the gradient of that node's output.
Of a linear layer that is the gradient of its output; of a module with several layers inside there are several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from typing import Any

import torch

from torch_lms.profile.storages import tensor_bytes

__all__ = ["kept_gradient_bytes"]


def kept_gradient_bytes(
    outputs: Iterable[torch.Tensor], before: Set[Any], is_weight: Callable[[torch.Tensor], bool]
) -> int:
    """Bytes of the gradients that are kept of one node of the graph.

    Args:
        outputs: of the node.
        before: autograd's nodes of the values that other nodes of the graph gave.
        is_weight: whether a leaf is a parameter; other leaves are values.
    """
    found = _Meetings(before, is_weight)
    made = [tensor for tensor in outputs if tensor.grad_fn is not None and tensor.grad_fn not in before]
    for tensor in made:
        found.look(tensor.grad_fn, tensor.output_nr)
    if all(hasattr(node, "_input_metadata") for node in found.met):
        return found.nbytes()
    # PyTorch 1.12, which has no zero bubble, does not say what else autograd's nodes get.
    return sum(map(tensor_bytes, made))


class _Meetings:
    def __init__(self, before: Set[Any], is_weight: Callable[[torch.Tensor], bool]) -> None:
        self._before, self._is_weight = before, is_weight
        self._reach: dict[Any, tuple[bool, bool]] = {}  # whether a node leads to values, and to weights alone
        self.met: list[Any] = []  # nodes that get both
        self._asked: dict[Any, set[int]] = {}  # the outputs of each node that something else reads

    def look(self, root: Any, output: int) -> None:
        """Goes from a node to what comes before it; no recursion, since a module may be deep."""
        self._asked.setdefault(root, set()).add(output)
        open_nodes = [root]
        while open_nodes:
            node = open_nodes[-1]
            inside = [one for one, _ in node.next_functions if one is not None and not self._is_end(one)]
            unseen = [one for one in inside if one not in self._reach]
            if unseen and node not in self._reach:
                open_nodes += unseen
                continue
            open_nodes.pop()
            if node not in self._reach:
                self._close(node)

    def _is_end(self, node: Any) -> bool:
        return node in self._before or hasattr(node, "variable")

    def _close(self, node: Any) -> None:
        """Of a node whose own inputs are known."""
        values = weights = False
        for one, output in node.next_functions:
            if one is None:
                continue
            if one in self._before:
                values = True
            elif hasattr(one, "variable"):
                is_weight = self._is_weight(one.variable)
                values, weights = values or not is_weight, weights or is_weight
            else:
                self._asked.setdefault(one, set()).add(output)
                leads_to_values, leads_to_weights = self._reach[one]
                values, weights = values or leads_to_values, weights or (leads_to_weights and not leads_to_values)
        self._reach[node] = values, weights
        if values and weights:
            self.met.append(node)

    def nbytes(self) -> int:
        """Of all that was found."""
        total = 0
        for node in self.met:
            metas = node._input_metadata
            for output in self._asked[node]:
                total += torch.Size(metas[output].shape).numel() * metas[output].dtype.itemsize
        return total
