"""Which module a node belongs to: a note at the node, in the place where torch.fx keeps its own."""

from __future__ import annotations

from torch import fx

__all__ = ["module_of", "set_module"]


def set_module(node: fx.Node, path: str) -> None:
    """Notes the qualified path of the module whose code made the node; empty for the model itself."""
    node.meta["nn_module_stack"] = {path: (path, None)} if path else {}


def module_of(node: fx.Node) -> str:
    """What `set_module` noted."""
    stack = node.meta.get("nn_module_stack") or {}
    return str(next(reversed(stack))) if stack else ""
