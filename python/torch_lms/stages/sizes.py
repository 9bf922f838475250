"""Which nodes of a graph give numbers that only depend on the shapes of tensors."""

from __future__ import annotations

import operator

from torch import fx

__all__ = ["sizes_in"]

_METHODS = frozenset(["size", "dim", "numel", "ndimension", "__len__"])
_FUNCTIONS = frozenset(["sym_size", "sym_numel", "len", "numel"])


def sizes_in(graph: fx.Graph) -> set[fx.Node]:
    """Sizes, and what is counted from nothing but sizes."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if _asks(node) or (_counts(node) and node.all_input_nodes and found.issuperset(node.all_input_nodes)):
            found.add(node)
    return found


def _asks(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _METHODS
    if node.op != "call_function":
        return False
    packet = getattr(node.target, "overloadpacket", node.target)
    if node.target is getattr:
        return node.args[1] in ("shape", "ndim")
    return str(getattr(packet, "__name__", "")).rpartition(".")[2] in _FUNCTIONS


def _counts(node: fx.Node) -> bool:
    name = str(getattr(node.target, "__name__", ""))
    return node.op == "call_function" and (getattr(operator, name, None) is node.target or name.startswith("sym_"))
