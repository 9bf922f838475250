"""Which nodes of a graph may share memory, and which write to it.

A graph's edges do not say that. It is read from what each node calls: from the operator's schema where there is one,
else from its name. Where that leaves room for doubt, memory counts as shared.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from torch_lms.profile.hooks import is_pytorchs

__all__ = ["Memory", "Modules", "attribute_of", "by_schema", "lineages", "may_share", "memory_of", "written"]

Modules = Mapping[str, nn.Module]

# Methods and functions whose result may be a view of their first input, or that input itself.
_VIEWS = frozenset(
    [
        "T",
        "H",
        "mT",
        "mH",
        "adjoint",
        "alias",
        "as_strided",
        "bfloat16",
        "bool",
        "broadcast_to",
        "chunk",
        "conj",
        "contiguous",
        "cpu",
        "cuda",
        "data",
        "detach",
        "diagonal",
        "double",
        "expand",
        "expand_as",
        "flatten",
        "float",
        "half",
        "hsplit",
        "vsplit",
        "dsplit",
        "imag",
        "int",
        "long",
        "movedim",
        "moveaxis",
        "narrow",
        "permute",
        "positive",
        "ravel",
        "real",
        "reshape",
        "reshape_as",
        "resolve_conj",
        "resolve_neg",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "swapaxes",
        "swapdims",
        "t",
        "tensor_split",
        "to",
        "transpose",
        "type",
        "type_as",
        "unbind",
        "unflatten",
        "unfold",
        "unsafe_chunk",
        "unsafe_split",
        "unsqueeze",
        "view",
        "view_as",
        "view_as_complex",
        "view_as_real",
        "lift_fresh",
    ]
)
_VIEWS_OF_ALL = frozenset(["broadcast_tensors", "meshgrid", "atleast_1d", "atleast_2d", "atleast_3d"])
_TENSOR_ATTRIBUTES = frozenset(["T", "H", "mT", "mH", "data", "real", "imag", "grad"])
DROPOUTS = frozenset(
    ["dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"]
)
_WITH_STATISTICS = frozenset(
    ["batch_norm", "instance_norm", "native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm"]
)
_RENORMING = frozenset(["embedding", "embedding_bag"])  # with max_norm they write to the weight
_VIEW_MODULES = (nn.Identity, nn.Flatten, nn.Unflatten)
_OPERATORS_IN_PLACE = frozenset(
    getattr(operator, name) for name in dir(operator) if name.startswith("i") and hasattr(operator, f"__{name}__")
) - {operator.index, operator.inv, operator.invert}


@dataclass(frozen=True)
class Memory:
    """What a graph does to the memory of its arguments. A module whose attribute ``memory`` is one is known by it.

    Attributes:
        written: places of the arguments that it changes.
        shared: places of those that its value may be in.
    """

    written: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()


def memory_of(graph: fx.Graph, modules: Modules) -> Memory:
    """What a graph does to the memory of its arguments."""
    lineage = lineages(graph, modules)
    output = next(node for node in graph.nodes if node.op == "output")
    changed = {origin for node in graph.nodes for value in written(node, modules) for origin in lineage[value]}
    given = {origin for value in output.all_input_nodes for origin in lineage[value]}
    arguments = [node for node in graph.nodes if node.op == "placeholder"]
    places = [tuple(place for place, node in enumerate(arguments) if node in nodes) for nodes in (changed, given)]
    return Memory(*places)


def written(node: fx.Node, modules: Modules) -> tuple[fx.Node, ...]:
    """The nodes whose memory this one changes."""
    memory = _memory(node, modules)
    if memory is not None:
        return tuple(dict.fromkeys(value for place in memory.written for value in _nodes(node.args[place])))
    schema = _schema_of(node)
    if schema is not None:
        found = [_nodes(value) for info, value in by_schema(node, schema) if _is_write(info)]
    else:
        found = [_nodes(node.kwargs.get("out"))] if node.op == "call_function" else []
        if _is_in_place(node, modules):
            found.append(_nodes(node.args[0] if node.args else node.kwargs.get("input")))
    if name_of(node.target) in _WITH_STATISTICS and option_of(node, ("training", "use_input_stats"), True) is not False:
        found.append(
            tuple(
                source
                for source in node.all_input_nodes
                if source.op == "get_attr" and not isinstance(attribute_of(source, modules), nn.Parameter)
            )
        )
    if name_of(node.target) in _RENORMING and option_of(node, ("max_norm",), None) is not None:
        found.append(_nodes(option_of(node, ("weight",), None)))
    return tuple(dict.fromkeys(source for sources in found for source in sources))


def may_share(node: fx.Node, modules: Modules) -> tuple[fx.Node, ...]:
    """The inputs whose memory the node's value may be in."""
    inputs = tuple(node.all_input_nodes)
    if not inputs or node.op == "output":
        return ()
    memory = _memory(node, modules)
    if memory is not None:
        return tuple(dict.fromkeys(value for place in memory.shared for value in _nodes(node.args[place])))
    if node.op == "call_module":
        return inputs[:1] if _module_may_share(modules.get(str(node.target))) else ()
    name = name_of(node.target)
    if name in _VIEWS_OF_ALL:
        return inputs
    if name in _WITH_STATISTICS | _RENORMING:
        return ()
    changed = written(node, modules)
    if changed:
        return changed
    if node.target is operator.getitem:
        return inputs[:1] if not _copies(node.args[1]) else ()
    if node.target is getattr:
        return inputs[:1] if node.args[1] in _TENSOR_ATTRIBUTES else ()
    if name in DROPOUTS:
        on = option_of(node, ("training", "train"), True) is True and option_of(node, ("p",), 0.5) != 0
        return () if on else inputs[:1]
    return inputs[:1] if name in _VIEWS or _is_view_by_schema(node) else ()


def lineages(graph: fx.Graph, modules: Modules) -> dict[fx.Node, frozenset[fx.Node]]:
    """Of each node itself and all nodes whose memory its value may be in; one tensor's ``get_attr`` nodes are one."""
    found: dict[fx.Node, frozenset[fx.Node]] = {}
    attributes: dict[int, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            first = attributes.setdefault(id(attribute_of(node, modules)), node)
            found[node] = found.get(first, frozenset([first]))
        else:
            found[node] = frozenset([node]).union(*(found[source] for source in may_share(node, modules)))
    return found


def attribute_of(node: fx.Node, modules: Modules) -> Any:
    """What a ``get_attr`` node reads; its target where the model is not there."""
    value: Any = modules.get("")
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    return value if value is not None else node.target


def name_of(target: Any) -> str:
    packet = getattr(target, "overloadpacket", None)
    return str(getattr(packet or target, "__name__", target)).rpartition(".")[2]


def _memory(node: fx.Node, modules: Modules) -> Memory | None:
    memory = getattr(modules.get(str(node.target)), "memory", None) if node.op == "call_module" else None
    return memory if isinstance(memory, Memory) else None


def _nodes(value: Any) -> tuple[fx.Node, ...]:
    values = value if isinstance(value, (tuple, list)) else [value]
    return tuple(item for item in values if isinstance(item, fx.Node))


def by_schema(node: fx.Node, schema: Any) -> Iterator[tuple[Any, Any]]:
    """Each argument as the schema has it, with its value."""
    for index, argument in enumerate(schema.arguments):
        value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
        yield argument, value


def _schema_of(node: fx.Node) -> Any:
    """None where there is none that tells of memory; those of PyTorch 1.12 do not."""
    schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
    told = schema is not None and all(hasattr(one, "alias_info") for one in (*schema.arguments, *schema.returns))
    return schema if told else None


def _is_write(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _is_view_by_schema(node: fx.Node) -> bool:
    schema = _schema_of(node)
    return schema is not None and any(one.alias_info is not None for one in schema.returns)


def _is_in_place(node: fx.Node, modules: Modules) -> bool:
    if node.op == "call_module":
        return bool(getattr(modules.get(str(node.target)), "inplace", False))
    if node.op not in ("call_function", "call_method"):
        return False
    if node.target is operator.setitem or node.target in _OPERATORS_IN_PLACE or option_of(node, ("inplace",), False):
        return True
    name = name_of(node.target)
    return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"


def option_of(node: fx.Node, names: tuple[str, ...], missing: Any) -> Any:
    """An argument by any of its names, also where it is given by place."""
    for name in names:
        if name in node.kwargs:
            return node.kwargs[name]
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return next((value for argument, value in by_schema(node, schema) if argument.name in names), missing)
    if node.op != "call_function" or not inspect.isfunction(node.target):
        return missing
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
    except (TypeError, ValueError):
        return missing
    bound.apply_defaults()
    return next((bound.arguments[name] for name in names if name in bound.arguments), missing)


def _copies(index: Any) -> bool:
    """Whether indexing copies for sure: a list does, a number or a slice does not."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, (list, torch.Tensor)) for part in parts)


def _module_may_share(module: nn.Module | None) -> bool:
    """Views, what does nothing now, what works in place, and modules whose code is unknown."""
    if module is None or not is_pytorchs(module) or any(True for _ in module.children()):
        return True
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.inplace or not module.training or module.p == 0
    return isinstance(module, _VIEW_MODULES) or bool(getattr(module, "inplace", False))
