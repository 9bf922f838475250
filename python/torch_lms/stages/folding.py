"""The code of a stage that gives segments up: each is a function of its own, which the stage's forward calls.

def segment_0(self, add_1):
# layers.1
...
return add_3

def forward(self, x):
...
add_3 = recomputed(segment_0, self, add_1)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

from torch import fx

from torch_lms.errors import PartitionError
from torch_lms.partition.relief import StageRelief
from torch_lms.profile.graph_code import GraphCode, generate
from torch_lms.stages.giving_up import Swaps, recomputed

__all__ = ["generate_with_relief", "recomputes"]

_CALLED = re.compile(r"self\._(recomputed|swapped)_(\d+)\(")
_SIGNATURE = re.compile(r"^def forward\(.*:\n", re.MULTILINE)
_CALLS = {"recomputed": "recomputed", "swapped": "swaps.run"}


def generate_with_relief(graph: fx.Graph, relief: StageRelief, title: str) -> GraphCode:
    """The code of a stage's graph, with a function for each segment that it gives up.

    Args:
        graph: of the stage.
        relief: names of nodes of the graph; a segment's nodes follow each other but for attributes that are read.
        title: as of `GraphCode`.

    Raises:
        PartitionError: for a segment whose nodes are not in the graph, or do not follow each other.
    """
    segments = [_Segment("recomputed", names) for names in relief.recomputed]
    segments += [_Segment("swapped", names) for names in relief.swapped]
    outer = _folded(graph, segments)
    whole = generate(outer, title)
    names: dict[str, Any] = dict(whole.names)
    functions = []
    for number, segment in enumerate(segments):
        code = generate(segment.graph, title)
        functions.append(code.source.replace("def forward(", f"def segment_{number}(", 1))
        _merge(names, code.names)
    forward = _CALLED.sub(lambda found: f"{_CALLS[found[1]]}(segment_{found[2]}, self, ", whole.source)
    _merge(names, {"recomputed": recomputed, "Swaps": Swaps})
    if relief.swapped:
        forward = _SIGNATURE.sub(lambda found: f"{found[0]}    swaps = Swaps(self)\n", forward, count=1)
    return GraphCode("\n".join([*functions, forward]), names, title)


def recomputes(source: str) -> bool:
    """Whether a stage with this code computes segments again in its backward."""
    return f"{_CALLS['recomputed']}(segment_" in source


@dataclass
class _Segment:
    kind: str
    names: tuple[str, ...]
    graph: fx.Graph = field(default_factory=fx.Graph)


def _folded(graph: fx.Graph, segments: Sequence[_Segment]) -> fx.Graph:
    """The graph with one call in place of each segment."""
    nodes = {node.name: node for node in graph.nodes}
    at_last: dict[fx.Node, tuple[int, list[fx.Node]]] = {}
    inside: set[fx.Node] = set()
    for number, segment in enumerate(segments):
        own = [nodes[name] for name in segment.names if name in nodes]
        _check_run(graph, segment, own)
        at_last[own[-1]] = number, own
        inside.update(own)
    outer, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node in at_last:
            number, own = at_last[node]
            _fold(outer, copies, own, segments[number], number)
        elif node not in inside and (node.op != "get_attr" or not set(node.users) <= inside):
            copies[node] = outer.node_copy(node, copies.__getitem__)
            copies[node].name = node.name
    return outer


def _check_run(graph: fx.Graph, segment: _Segment, own: list[fx.Node]) -> None:
    if len(own) != len(segment.names):
        missing = next(name for name in segment.names if name not in {node.name for node in own})
        raise PartitionError(f"expected the nodes of a segment in its stage, found {missing!r} elsewhere; cut again")
    order = [node for node in graph.nodes if node.op not in ("get_attr", "placeholder", "output")]
    first = order.index(own[0])
    if order[first : first + len(own)] != own:
        raise PartitionError(
            f"expected nodes that follow each other from {own[0].name!r} to {own[-1].name!r}, found others between "
            "them; cut again"
        )


def _fold(outer: fx.Graph, copies: dict[fx.Node, fx.Node], own: list[fx.Node], segment: _Segment, number: int) -> None:
    """Moves the nodes of a segment to a graph of their own, and calls that."""
    members, inner = set(own), dict[fx.Node, fx.Node]()
    sources = dict.fromkeys(source for node in own for source in node.all_input_nodes if source not in members)
    entering = [source for source in sources if source.op != "get_attr"]
    for source in entering:
        inner[source] = segment.graph.create_node("placeholder", source.name, name=source.name)
    for node in own:
        for needed in (*node.all_input_nodes, node):  # an attribute is read just before it is used
            if needed not in inner:
                inner[needed] = segment.graph.node_copy(needed, inner.__getitem__)
                inner[needed].name = needed.name
    leaving = [node for node in own if not set(node.users) <= members]
    given = tuple(inner[node] for node in leaving)
    segment.graph.output(given[0] if len(given) == 1 else given)
    called = outer.create_node(
        "call_module", f"_{segment.kind}_{number}", tuple(copies[source] for source in entering), name=f"given_{number}"
    )
    if len(leaving) == 1:
        called.name = leaving[0].name
        copies[leaving[0]] = called
    else:
        for place, node in enumerate(leaving):
            copies[node] = outer.create_node("call_function", getitem, (called, place), name=node.name)


def _merge(names: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        if names.setdefault(name, value) is not value:
            raise PartitionError(
                f"expected one meaning of {name!r} in the code of a stage, found two: {names[name]!r} and {value!r}; "
                "give one of them another name"
            )
