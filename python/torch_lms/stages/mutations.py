"""Operations in place: what they order besides the graph's edges.

A node that changes a tensor in place orders the other readers of that tensor: those before it must not come after it,
nor those after it before. The graph has no edges for that. Inside a stage the order of the original program is kept;
between stages it is checked here.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

from torch import fx, nn

from torch_lms.errors import PartitionError

__all__ = ["check_order", "mutated"]

_VIEW_METHODS = frozenset(
    [
        "T",
        "as_strided",
        "chunk",
        "contiguous",
        "data",
        "detach",
        "diagonal",
        "expand",
        "expand_as",
        "flatten",
        "float",
        "getitem",
        "movedim",
        "narrow",
        "permute",
        "real",
        "reshape",
        "select",
        "split",
        "squeeze",
        "swapaxes",
        "t",
        "to",
        "transpose",
        "type",
        "unbind",
        "unflatten",
        "unfold",
        "unsqueeze",
        "view",
        "view_as",
    ]
)
_INPLACE_OPERATORS = frozenset(
    getattr(operator, name) for name in dir(operator) if name.startswith("i") and hasattr(operator, f"__{name}__")
) - {operator.index, operator.inv, operator.invert}


def _name(target: Any) -> str:
    packet = getattr(target, "overloadpacket", None)
    return str(getattr(packet or target, "__name__", target)).rpartition(".")[2]


def _in_place(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    if node.op == "call_module":
        return bool(getattr(modules.get(str(node.target)), "inplace", False))
    if node.op not in ("call_function", "call_method"):
        return False
    if node.kwargs.get("inplace") is True or node.target is operator.setitem or node.target in _INPLACE_OPERATORS:
        return True
    name = _name(node.target)
    return name.endswith("_") and not name.endswith("__")


def mutated(node: fx.Node, modules: Mapping[str, nn.Module]) -> tuple[fx.Node, ...]:
    """The nodes whose tensors this one changes in place."""
    outs = node.kwargs.get("out") if node.op == "call_function" else None
    found = [value for value in (outs if isinstance(outs, (tuple, list)) else [outs]) if isinstance(value, fx.Node)]
    if _in_place(node, modules) and node.all_input_nodes:
        first = node.args[0] if node.args else node.kwargs.get("input")
        found += [first] if isinstance(first, fx.Node) else []
    return tuple(found)


def _may_alias_input(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    if node.op == "call_module":
        module = modules.get(str(node.target))
        return isinstance(module, (nn.Identity, nn.Flatten, nn.Unflatten)) or not getattr(module, "training", True)
    return node.target in (operator.getitem, getattr) or _name(node.target) in _VIEW_METHODS


def _alias_roots(graph: fx.Graph, modules: Mapping[str, nn.Module]) -> dict[fx.Node, fx.Node]:
    roots: dict[fx.Node, fx.Node] = {}
    attributes: dict[str, fx.Node] = {}
    for node in graph.nodes:
        sources = mutated(node, modules)
        if not sources and node.all_input_nodes and _may_alias_input(node, modules):
            sources = tuple(node.all_input_nodes[:1])
        if node.op == "get_attr":
            roots[node] = attributes.setdefault(str(node.target), node)
        else:
            roots[node] = roots[sources[0]] if sources else node
    return roots


def check_order(graph: fx.Graph, modules: Mapping[str, nn.Module], stage_of: Mapping[fx.Node, int]) -> None:
    """Refuses a partition under which an operation in place would be seen too early, too late or not at all.

    Raises:
        PartitionError: naming both nodes.
    """
    _check_statistics(graph, modules, stage_of)
    place = {node: index for index, node in enumerate(graph.nodes)}
    writers = [(node, value) for node in graph.nodes for value in mutated(node, modules)]
    if not writers:
        return
    roots = _alias_roots(graph, modules)
    for writer, value in writers:
        for reader, read in _readers(graph, roots, roots[value]):
            if reader is writer or reader not in stage_of:
                continue
            stage, own = stage_of[writer], stage_of[reader]
            after = place[reader] > place[writer]
            # Each stage has its own copy of a buffer or an input of the model: a change in one is unseen in the others.
            copied = roots[value].op in ("get_attr", "placeholder") and own != stage
            apart = read is not value and place[read] < place[writer] and stage_of.get(read, stage) < stage
            if copied or (after and (own < stage or apart)) or (not after and own > stage):
                raise PartitionError(
                    f"expected {reader.name!r}, which reads what {writer.name!r} changes in place, to see the change "
                    f"{'made' if after else 'not yet made'}, found them in stages {own} and {stage}; put "
                    f"{value.name!r}, {writer.name!r} and {reader.name!r} into one stage, or change the model to "
                    "not work in place"
                )


def _check_statistics(graph: fx.Graph, modules: Mapping[str, nn.Module], stage_of: Mapping[fx.Node, int]) -> None:
    """A batch norm that is called in two stages would gather two sets of running statistics."""
    first: dict[int, fx.Node] = {}
    for node in graph.nodes:
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        if module is None or not module.training or getattr(module, "running_mean", None) is None:
            continue
        other = first.setdefault(id(module), node)
        if stage_of[other] != stage_of[node]:
            raise PartitionError(
                f"expected all calls of {node.target!r}, which updates running statistics, in one stage, found "
                f"{other.name!r} in stage {stage_of[other]} and {node.name!r} in stage {stage_of[node]}; "
                "put them into one stage"
            )


def _readers(graph: fx.Graph, roots: Mapping[fx.Node, fx.Node], root: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    for node in graph.nodes:
        for value in node.all_input_nodes:
            if roots[value] is root:
                yield node, value
