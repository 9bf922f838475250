"""How a graph differs from that of the other mode, training or evaluation: the same model, traced once more."""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import fx, nn

from torch_lms.errors import ProfileError
from torch_lms.profile.aliases import DROPOUTS, attribute_of, by_schema, name_of
from torch_lms.profile.ownership import module_of
from torch_lms.profile.regions import Region
from torch_lms.profile.sameness import is_same, without_addresses
from torch_lms.profile.tracing import trace_again
from torch_lms.stages.mode_arguments import FLAG, given_to, mode_name, with_argument
from torch_lms.stages.own_modes import OwnModes, find_own_modes

if TYPE_CHECKING:
    from torch_lms.profile.tracing import TracedModel

__all__ = ["OtherMode", "told"]

# What a tracer calls the tensors that the model made while it was traced.
_CONSTANT = re.compile(r"^_tensor_constant\d+$|lifted_tensor_\d+$")
_COUNT = "num_batches_tracked"


@dataclass(frozen=True)
class OtherMode:
    """How a graph differs from that of the other mode; nothing is known where it was not looked for.

    Attributes:
        elsewhere: paths of modules whose code computes otherwise, such as behind ``if self.training``.
        told: what calls are told of the mode there, by the names of their nodes.
        own: what is known of a `train` of the model's own.
    """

    elsewhere: frozenset[str] = frozenset()
    told: Mapping[str, Any] = field(default_factory=dict)
    own: OwnModes = field(default_factory=OwnModes)

    @classmethod
    def of(cls, traced: TracedModel) -> OtherMode:
        """Has the model traced in the other mode, from the same source; what cannot be traced computes otherwise.

        Of one trace once, as long as the model's modules are in the same modes: it takes as long as to trace.
        """
        if traced.graph_module is None:
            return cls()
        looked_at = (*(module.training for module in traced.model.modules()), len(traced.graph_module.graph.nodes))
        known = _known.get(traced.graph_module)
        if known is None or known[0] != looked_at:
            known = _known[traced.graph_module] = looked_at, cls._found(traced, traced.graph_module)
        return known[1]

    @classmethod
    def _found(cls, traced: TracedModel, graph_module: fx.GraphModule) -> OtherMode:
        own = find_own_modes(traced.model, _whole(graph_module))
        if own.reason:
            return cls(elsewhere=frozenset(own.of), own=own)
        other = _traced_in_other_mode(traced, own)
        if other is None:
            return cls(elsewhere=frozenset([""]), own=own)
        found = _told_by_twins(graph_module, other)
        if found is not None:
            return cls(told=found, own=own)
        parts, others = (_lines_by_module(one) for one in (graph_module, other))
        elsewhere = {path for path in {**parts, **others} if parts.get(path) != others.get(path)}
        return cls(elsewhere=frozenset(elsewhere or [""]), own=own)


_known: WeakKeyDictionary[fx.GraphModule, tuple[tuple[int, ...], OtherMode]] = WeakKeyDictionary()


def _whole(graph_module: fx.GraphModule) -> list[nn.Module]:
    called = [graph_module.get_submodule(str(node.target)) for node in graph_module.graph.nodes if _calls(node)]
    return [one for one in called if not isinstance(one, Region)]


def _traced_in_other_mode(traced: TracedModel, own: OwnModes) -> fx.GraphModule | None:
    model = traced.model
    modes, names = [(module, module.training) for module in model.modules()], set(vars(model))
    other = not model.training
    otherwise = own.of.get("", {}).get(other, {})
    try:
        for path, module in model.named_modules():
            module.training = otherwise.get(path, other)
        return trace_again(traced).graph_module
    except ProfileError:
        return None
    finally:
        for module, mode in modes:
            module.training = mode
        for name in set(vars(model)) - names:  # constants of the other graph
            delattr(model, name)


def told(node: fx.Node) -> Any:
    """What a call is told of the mode; None where it is not."""
    name = mode_name(node.target) if node.op == "call_function" else None
    return None if name is None else given_to(node.target, node.args, node.kwargs, name)


def _told_by_twins(one: nn.Module, other: nn.Module) -> dict[str, Any] | None:
    """What the calls of a graph are told in another, which does the same but for its mode; None if it does not.

    A dropout that is on in the first may be missing in the other. One that is off there gives out what it got, and from
    2.15 on PyTorch's tracers have what reads the one read the other. Batch norms count their batches in training alone.
    """
    found: dict[str, Any] = {}
    places: dict[fx.Node, str] = {}
    left = iter(_nodes_of(other))
    twin = next(left, None)
    for place, node in enumerate(_nodes_of(one)):
        if (
            twin is not None
            and _line(node, places.get) == _line(twin, places.get)
            and _reads_same(one, node, other, twin)
        ):
            source = _source_of(twin, other)
            places[node] = places[twin] = str(place) if source is None else places[source]
            found[node.name] = told(twin)
            twin = next(left, None)
        elif _drops(node):
            places[node], found[node.name] = places[node.all_input_nodes[0]], False
        else:
            return None
    return found if twin is None else None


def _source_of(node: fx.Node, holder: Any) -> fx.Node | None:
    """The node whose value this one gives out as it is, where that is known."""
    if told(node) is False and name_of(node.target).rstrip("_") in DROPOUTS:
        return node.all_input_nodes[0]
    if node.target is not operator.getitem or not _calls(call := node.all_input_nodes[0]):
        return None
    region = holder.get_submodule(str(call.target))
    if not isinstance(region, Region) or not hasattr(region, "graph"):
        return None
    inputs = [one for one in region.graph.nodes if one.op == "placeholder"]
    results: Any = next(one.args[0] for one in region.graph.nodes if one.op == "output")
    index: Any = node.args[1]
    value: Any = results[index]
    while isinstance(value, fx.Node) and value not in inputs:
        value = _source_of(value, region)
    found = call.args[inputs.index(value)] if isinstance(value, fx.Node) else None
    return found if isinstance(found, fx.Node) else None


def _nodes_of(holder: Any) -> list[fx.Node]:
    """Those of a graph module or a region, without such as count the batches of a batch norm."""
    return [node for node in holder.graph.nodes if not any(map(_is_count, (node, *node.all_input_nodes[:1])))]


def _calls(node: fx.Node) -> bool:
    return node.op == "call_module"


def _is_count(node: fx.Node) -> bool:
    return node.op == "get_attr" and str(node.target).rpartition(".")[2] == _COUNT


def _drops(node: fx.Node) -> bool:
    return told(node) is True and name_of(node.target).rstrip("_") in DROPOUTS


def _reads_same(one: nn.Module, node: fx.Node, other: nn.Module, twin: fx.Node) -> bool:
    """Whether attributes that two nodes read are the same, and what regions do that they call."""
    if node.op == "get_attr":
        return is_same(attribute_of(node, {"": one}), attribute_of(twin, {"": other}))
    if not _calls(node):
        return True
    part, other_part = (holder.get_submodule(str(call.target)) for holder, call in ((one, node), (other, twin)))
    if not isinstance(part, Region) or not isinstance(other_part, Region):
        return True
    if repr(part) != repr(other_part):
        return False
    if not (hasattr(part, "graph") and hasattr(other_part, "graph")):  # a copy has its code alone
        return part.generated.source == other_part.generated.source
    return _told_by_twins(part, other_part) is not None


def _line(node: fx.Node, shown: Callable[[fx.Node], Any]) -> tuple[str, ...]:
    """What a node does, whatever the mode, and whatever the constants are called."""
    target = _CONSTANT.sub("constant", str(node.target)) if node.op == "get_attr" else str(node.target)
    args, kwargs = node.args, dict(node.kwargs)
    schema = getattr(node.target, "_schema", None)
    if schema is not None:  # graphs leave defaults out
        args, kwargs = (), {argument.name: value for argument, value in by_schema(node, schema)}
    if told(node) is not None:
        args, kwargs = with_argument(node.target, args, kwargs, mode_name(node.target) or "", FLAG)
    args, kwargs = fx.node.map_arg((args, kwargs), shown)
    return node.op, *map(without_addresses, (target, args, kwargs))


def _lines_by_module(holder: Any) -> dict[str, list[tuple[str, ...]]]:
    found: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for node in _nodes_of(holder):
        found[module_of(node)].append(_line(node, lambda _: "value"))
        called = holder.get_submodule(str(node.target)) if _calls(node) else None
        if isinstance(called, Region):
            found[module_of(node)].append((called.generated.source,))
    return found
