"""What orders nodes besides the graph's edges: no cut may lie where it would change what a node sees.

Note [What orders nodes]. Let W write to the memory of a value, and R read a value in the same memory. Values are in the
same memory only within one stage: each value that crosses a border is a tensor of its own behind it, each stage has an
own copy of the model's inputs and buffers, and in the order of the program all that crosses leaves a stage at its end.
So, where R comes before W in the program:

- R is not in a later stage than W: it would see the change.

And where R comes after W:

- R is not in an earlier stage: it would not see the change. If R reads what W itself gives, the edges see to that.
- The views between R's value and W's value, as far as they were made before W, are not in earlier stages than W: they
  would cross apart from each other. Where only an input or a buffer connects the two, R is in the stage of W.

What writes to a buffer or a parameter must be seen in the next step as well: all that reads it is in one stage, unless
it reads what W gives. So are all calls of a module that changes its own buffers, such as a batch norm, and all that
reads the weight of an embedding that keeps its rows below a norm.

What draws random numbers draws others if it does so earlier or later: so each that does is in no later stage than the
next one of the program.

At last, an object that the graph makes to return it cannot cross a border: it is made in the last stage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

from torch import fx, nn

from torch_lms.profile.aliases import Memory, Modules, attribute_of, lineages, written
from torch_lms.profile.hooks import is_pytorchs
from torch_lms.profile.random_draws import draws

__all__ = ["Constraint", "find_constraints", "find_writes", "written_attributes"]

COMPUTED = ("call_function", "call_method", "call_module")
IN_PLACE, STATISTICS, RETURNED, RANDOM = "in place", "running statistics", "returned", "random numbers"


@dataclass(frozen=True)
class Constraint:
    """One node must not be in a later stage than another.

    Attributes:
        first: must be in the same or an earlier stage.
        then: must be in the same or a later stage.
        why: ``in place``, ``running statistics``, ``returned`` or ``random numbers``.
        writer: what changes the memory; None where that is not the reason.
    """

    first: fx.Node
    then: fx.Node
    why: str
    writer: fx.Node | None = None


def find_constraints(graph: fx.Graph, modules: Modules) -> list[Constraint]:
    """All constraints of a graph that its edges do not say; see Note [What orders nodes].

    Args:
        graph: in the order of the program.
        modules: by path, the root under the empty one.
    """
    found = dict.fromkeys(
        [
            *_one_stage_for_statistics(graph, modules),
            *_made_last(graph),
            *_in_place(graph, modules),
            *_drawn_in_turn(graph, modules),
        ]
    )
    return [one for one in found if one.first is not one.then and one.first not in one.then.all_input_nodes]


def find_writes(graph: fx.Graph, modules: Modules) -> dict[fx.Node, tuple[str, ...]]:
    """Of each node that changes memory: the nodes that the memory comes from, and what of its own module it changes.

    Args:
        graph: in the order of the program.
        modules: by path, the root under the empty one.
    """
    lineage = lineages(graph, modules)
    found: dict[fx.Node, tuple[str, ...]] = {}
    for node in graph.nodes:
        module = _called(node, modules)
        names = [f"{node.target}.{name}" for name in _changes(module)] if module is not None else []
        for value in written(node, modules):
            names += [origin.name for origin in lineage[value] if len(lineage[origin]) == 1]
        if names:
            found[node] = tuple(dict.fromkeys(names))
    return found


def written_attributes(graph: fx.Graph, modules: Modules) -> dict[fx.Node, frozenset[str]]:
    """Of each node that changes parameters or buffers, or may: their paths.

    Args:
        graph: in the order of the program.
        modules: by path, the root under the empty one.
    """
    lineage = lineages(graph, modules)
    names: dict[int, set[str]] = defaultdict(set)
    for node in graph.nodes:
        if node.op == "get_attr":
            names[id(attribute_of(node, modules))].add(str(node.target))
    found: dict[fx.Node, frozenset[str]] = {}
    for node in graph.nodes:
        module = _called(node, modules)
        paths: set[str] = set()
        if module is not None and not _is_known(module):
            paths |= {f"{node.target}.{name}" for name, _ in (*module.named_parameters(), *module.named_buffers())}
        paths |= {f"{node.target}.{name}" for name in _renormed(module)}
        for origin in {origin for value in written(node, modules) for origin in lineage[value]}:
            if origin.op == "get_attr":
                paths |= names[id(attribute_of(origin, modules))]
        if paths:
            found[node] = frozenset(paths)
    return found


def _sinks(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op in COMPUTED and all(user.op == "output" for user in node.users)]


def _made_last(graph: fx.Graph) -> Iterator[Constraint]:
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, type):
            yield from (Constraint(sink, node, RETURNED) for sink in _sinks(graph))


def _drawn_in_turn(graph: fx.Graph, modules: Modules) -> Iterator[Constraint]:
    for first, then in pairwise(node for node in graph.nodes if draws(node, modules)):
        yield Constraint(first, then, RANDOM)


def _one_stage_for_statistics(graph: fx.Graph, modules: Modules) -> Iterator[Constraint]:
    first: dict[int, fx.Node] = {}
    for node in graph.nodes:
        module = _called(node, modules)
        if module is None or not _changes(module):
            continue
        other = first.setdefault(id(module), node)
        yield Constraint(other, node, STATISTICS, node)
        yield Constraint(node, other, STATISTICS, node)


def _changes(module: nn.Module) -> list[str]:
    """What of its own a call of a module changes, or may: buffers, and weights that are known to be written to."""
    known = all(map(is_pytorchs, module.modules()))
    changing = {
        path
        for path, one in module.named_modules()
        if not known or (one.training and getattr(one, "running_mean", None) is not None)
    }
    buffers = [name for name, _ in module.named_buffers() if name.rpartition(".")[0] in changing]
    return [*buffers, *_renormed(module)]


def _renormed(module: nn.Module | None) -> list[str]:
    """The weights of embeddings with a largest norm, which they see to in their forward."""
    return [
        f"{path}.weight" if path else "weight"
        for path, one in (module.named_modules() if module is not None else ())
        if isinstance(one, (nn.Embedding, nn.EmbeddingBag)) and one.max_norm is not None
    ]


def _called(node: fx.Node, modules: Modules) -> nn.Module | None:
    return modules.get(str(node.target)) if node.op == "call_module" else None


def _is_known(module: nn.Module) -> bool:
    """Whether it is known what it writes to."""
    return isinstance(getattr(module, "memory", None), Memory) or all(map(is_pytorchs, module.modules()))


def _in_place(graph: fx.Graph, modules: Modules) -> Iterator[Constraint]:
    writes = [(node, value) for node in graph.nodes for value in written(node, modules)]
    layers = [node for node in graph.nodes if _renormed(_called(node, modules))]
    if not writes and not layers:
        return
    search = _Search(graph, modules, writes)
    for writer, value in writes:
        yield from search.around(writer, value)
    for writer in layers:
        yield from search.around_layer(writer)


class _Search:
    """The constraints of writers, one by one."""

    def __init__(self, graph: fx.Graph, modules: Modules, writes: list[tuple[fx.Node, fx.Node]]) -> None:
        self._place = {node: index for index, node in enumerate(graph.nodes)}
        self._lineage = lineages(graph, modules)
        self._sinks = _sinks(graph)
        self._writers = {writer for writer, _ in writes}
        self._readers: dict[fx.Node, list[tuple[fx.Node, fx.Node]]] = defaultdict(list)
        for node in graph.nodes:
            for value in node.all_input_nodes:
                for origin in self._origins(value):
                    self._readers[origin].append((node, value))
        self._holders: dict[int, list[fx.Node]] = defaultdict(list)
        for node in graph.nodes:
            module = _called(node, modules)
            for tensor in (*module.parameters(), *module.buffers()) if module is not None else ():
                self._holders[id(tensor)].append(node)
        self._modules = modules

    def _origins(self, value: fx.Node) -> list[fx.Node]:
        """The nodes that the value's memory may come from first."""
        return [node for node in self._lineage[value] if len(self._lineage[node]) == 1]

    def around(self, writer: fx.Node, value: fx.Node) -> Iterator[Constraint]:
        """The constraints between a writer and all that reads the same memory."""
        kept = [node for node in self._lineage[value] if node.op == "get_attr"]
        if kept:
            yield from self._all_with(writer, [node for node in self._lineage[value] if node.op in COMPUTED])
            for node in kept:
                yield from self._all_with(writer, self._holders[id(attribute_of(node, self._modules))])
        pairs = dict.fromkeys(pair for origin in self._origins(value) for pair in self._readers[origin])
        for reader, read in pairs:
            common = self._lineage[read] & self._lineage[value]
            if reader is writer or not common or writer in self._lineage[read]:
                continue
            if not common.isdisjoint(kept):
                views = [node for node in self._lineage[read] if node.op in COMPUTED]
                yield from self._all_with(writer, [*views, reader])
            elif self._place[reader] < self._place[writer]:
                if not self._known(reader, value, common):
                    yield Constraint(reader, writer, IN_PLACE, writer)
            else:
                yield from self._seen_after(writer, value, reader, read)

    def around_layer(self, writer: fx.Node) -> Iterator[Constraint]:
        """All that reads a weight of a layer that writes to it is in the stage of the layer."""
        layer = self._modules[str(writer.target)]
        for name in _renormed(layer):
            weight = attrgetter(name)(layer)
            yield from self._all_with(writer, self._holders[id(weight)])
            for origin, readers in self._readers.items():
                if origin.op == "get_attr" and attribute_of(origin, self._modules) is weight:
                    yield from self._all_with(writer, [reader for reader, _ in readers])

    def _known(self, reader: fx.Node, value: fx.Node, common: frozenset[fx.Node]) -> bool:
        """Whether a writer between the two, whose result this one changes further, has the same constraint."""
        between = [node for node in self._lineage[value] if node in self._writers]
        last = max(between, key=self._place.__getitem__, default=None)
        if last is None or self._place[last] <= self._place[reader]:
            return False
        return not common.isdisjoint(self._lineage[last])

    def _seen_after(self, writer: fx.Node, value: fx.Node, reader: fx.Node, read: fx.Node) -> Iterator[Constraint]:
        one, other = self._lineage[read], self._lineage[value]
        if reader.op in COMPUTED:
            yield Constraint(writer, reader, IN_PLACE, writer)
        for view in one ^ other:
            if view.op in COMPUTED and self._place[view] < self._place[writer]:
                yield Constraint(writer, view, IN_PLACE, writer)
        if not any(node.op in COMPUTED for node in one & other):
            yield from self._all_with(writer, [reader])

    def _all_with(self, writer: fx.Node, nodes: list[fx.Node]) -> Iterator[Constraint]:
        """All of them in the stage of the writer; the model's output is in the last."""
        for node in nodes:
            if node.op == "output":
                yield from (Constraint(sink, writer, IN_PLACE, writer) for sink in self._sinks)
            elif node is not writer:
                yield Constraint(node, writer, IN_PLACE, writer)
                yield Constraint(writer, node, IN_PLACE, writer)
