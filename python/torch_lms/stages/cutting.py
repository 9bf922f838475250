"""Stages: a traced model cut into modules that run one after the other.

    stage 0                 stage 1                      stage 2
    forward(ids)            forward(x, skip)             forward(y, skip, targets)
      -> x, skip              -> y, skip                   -> what the model returns

Values that cross a border are a stage's first arguments, in the same order as the outputs of the stage before it. A
value that skips a stage goes through it. What the model itself is given (ids, targets) goes straight to every stage
that uses it. Parameters keep the names that they have in the model, so that state dicts merge and split by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from torch_lms.errors import PartitionError
from torch_lms.partition.relief import StageRelief
from torch_lms.profile.constraints import written_attributes
from torch_lms.profile.graph_code import generate
from torch_lms.stages import installation, mutations
from torch_lms.stages.arguments import find_arguments
from torch_lms.stages.folding import generate_with_relief
from torch_lms.stages.modes import ModeWriter
from torch_lms.stages.other_mode import OtherMode
from torch_lms.stages.sizes import sizes_in
from torch_lms.stages.stage import Borders, Stage, own_name

if TYPE_CHECKING:
    from torch_lms.profile.tracing import TracedModel

__all__ = ["split"]

_COMPUTED = ("call_function", "call_method", "call_module")


def split(
    traced: TracedModel | fx.GraphModule,
    stage_of: Mapping[str, int],
    *,
    model: nn.Module | None = None,
    relief: Sequence[StageRelief] = (),
) -> list[Stage]:
    """Cuts a traced model into stages.

    The stages hold the model's own parameters and submodules, not copies: `torch_lms.stages.materialize.materialize`
    makes a stage its own and moves it.

    Args:
        traced: the graph.
        stage_of: stage of each node that computes something, from 0; stages of other nodes follow from it.
        model: what was traced; its parameters that the graph does not use then go to a stage as well, so that the
            stages' state dicts make up the model's.
        relief: what each stage gives up to fit, as `Partition.stage_relief` says; empty where none does.

    Raises:
        PartitionError: if there is no graph, a node has no stage, a stage has no node, an edge goes backwards, an
            operation in place would be seen at the wrong time, or stages would share memory but not a parameter.
    """
    graph_module = _graph_module(traced)
    graph = graph_module.graph
    placed, count = _place(graph, stage_of)
    modules = dict(graph_module.named_modules(remove_duplicate=False))
    mutations.check_order(graph, modules, placed)
    borders = _find_borders(graph, placed, count)
    borders.arguments = find_arguments(graph, traced)
    borders.shapes = getattr(traced, "shapes", {})
    writes = written_attributes(graph, modules)
    borders.writes = [frozenset(name for node in nodes for name in writes.get(node, ())) for nodes in borders.nodes]
    borders.sizes = frozenset(node.name for node in sizes_in(graph))
    name = type(model).__name__ if model is not None else str(getattr(traced, "name", "model"))
    origin = graph_module if model is None else model
    modes = {path: module.training for path, module in origin.named_modules(remove_duplicate=False)}
    other = OtherMode() if isinstance(traced, fx.GraphModule) else OtherMode.of(traced)
    fixed = {path: modes[path] for path in other.elsewhere}
    stages = []
    for index in range(count):
        title, given_up = f"stage {index} of {count} of {name}", relief[index] if relief else StageRelief()
        own = _stage_graph(graph, borders, index)
        written = ModeWriter(own, modes, other, own_name)
        code = generate_with_relief(own, given_up, title) if given_up else generate(own, title)
        stage = Stage(index=index, count=count, code=code, borders=borders)
        stage.fixed = {**dict.fromkeys(sorted(written.fixed), False), **fixed}
        stage.why_fixed = other.own.reason
        installation.hold_modes(stage, origin, {*written.paths, *fixed})
        stages.append(stage)
    installation.install(stages, graph_module, borders.nodes, model)
    installation.follow_modes(stages, other.own.of)
    devices = {value.device for _, value in installation.named_tensors(graph_module)}
    for stage in stages:
        stage.device = devices.copy().pop() if len(devices) == 1 else None
    return stages


def _graph_module(traced: Any) -> fx.GraphModule:
    if isinstance(traced, fx.GraphModule):
        return traced
    graph_module = getattr(traced, "graph_module", traced)
    if graph_module is traced:
        raise PartitionError(
            f"expected a TracedModel or a GraphModule to cut, found {type(traced).__name__}; trace the model first"
        )
    if not isinstance(graph_module, fx.GraphModule):
        notes = "; ".join(traced.notes) or "no reason noted"
        raise PartitionError(
            f"expected a model with a graph to cut, found one that was only observed while running ({notes}); "
            "change the lines named, or wrap them with torch.fx.wrap"
        )
    return graph_module


def _place(graph: fx.Graph, stage_of: Mapping[str, int]) -> tuple[dict[fx.Node, int], int]:
    placed: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op not in _COMPUTED:
            continue
        if node.name not in stage_of:
            raise PartitionError(f"expected a stage for each node, found none for {node.name!r}; give it one")
        if not isinstance(stage_of[node.name], Integral):
            raise PartitionError(
                f"expected the number of a stage for {node.name!r}, found {stage_of[node.name]!r}; count from 0"
            )
        placed[node] = stage_of[node.name]
        for source in node.all_input_nodes:
            if placed.get(source, -1) > placed[node]:
                raise PartitionError(
                    f"expected stages in the order of the graph, found {source.name!r} in stage {placed[source]} and "
                    f"its reader {node.name!r} in stage {placed[node]}; move one of them"
                )
    used = set(placed.values())
    count = max(used, default=0) + 1
    missing = sorted(set(range(count)) - used)
    if missing or min(used, default=0) < 0:
        raise PartitionError(
            f"expected stages from 0 with at least one node each, found stages {sorted(used)}; "
            "ask for no more stages than there are nodes"
        )
    return placed, count


def _find_borders(graph: fx.Graph, placed: Mapping[fx.Node, int], count: int) -> Borders:
    borders = Borders(nodes=[[node for node in placed if placed[node] == index] for index in range(count)])
    output = next(node for node in graph.nodes if node.op == "output")

    def users(node: fx.Node) -> set[int]:
        return {count - 1 if user is output else placed[user] for user in node.users}

    reach = {node: max(users(node), default=stage) for node, stage in placed.items()}
    arguments = [node for node in graph.nodes if node.op == "placeholder"]
    starred = [str(node.target) for node in arguments if str(node.target).startswith("*")]
    if starred:
        raise PartitionError(
            f"expected arguments with names, found {starred}; give the model's forward named arguments"
        )
    if any(node.target == "torch" for node in arguments):
        raise PartitionError(
            "expected arguments with other names than 'torch', which is PyTorch in the code of a stage, found one; "
            "rename it"
        )
    for index in range(count):
        borders.incoming.append(tuple(node.name for node, last in reach.items() if placed[node] < index <= last))
        borders.outgoing.append(tuple(node.name for node, last in reach.items() if placed[node] <= index < last))
        borders.feeds.append(tuple(str(node.target) for node in arguments if index in users(node)))
    return borders


def _stage_graph(graph: fx.Graph, borders: Borders, index: int) -> fx.Graph:
    """The stage's own graph: placeholders, copies of its nodes, and what it gives."""
    made = fx.Graph()
    own: dict[fx.Node, fx.Node] = {}
    by_name = {node.name: node for node in graph.nodes}

    def copy(node: fx.Node) -> fx.Node:
        if node not in own:  # an attribute is read where it is used, in each stage anew
            own[node] = made.create_node("get_attr", own_name(str(node.target)), name=node.name)
            own[node].meta = dict(node.meta)
        return own[node]

    for name in borders.incoming[index]:
        own[by_name[name]] = made.create_node("placeholder", name, name=name)
    for node in graph.nodes:
        if node.op == "placeholder" and str(node.target) in borders.feeds[index]:
            own[node] = made.create_node("placeholder", node.target, node.args, name=node.name)
    for node in borders.nodes[index]:
        args, kwargs = fx.node.map_arg(node.args, copy), fx.node.map_arg(node.kwargs, copy)
        target = own_name(str(node.target)) if node.op == "call_module" else node.target
        own[node] = made.create_node(node.op, target, args, kwargs, node.name)
        own[node].meta = dict(node.meta)
    if index + 1 < len(borders.nodes):
        values = tuple(own[by_name[name]] for name in borders.outgoing[index])
        made.output(values[0] if len(values) == 1 else values)
    else:
        output = next(node for node in graph.nodes if node.op == "output")
        made.output(fx.node.map_arg(output.args[0], copy))
    return made
