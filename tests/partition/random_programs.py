"""Random models as torch.fx graphs: modules, functions, methods, skips, ties, tuples and numbers, several outputs."""

from __future__ import annotations

import operator
import random

import torch
from torch import fx, nn
from torch.nn import functional

WIDTH = 4


class Root(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.Sequential(nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.tied = self.scale
        self.register_buffer("offset", torch.zeros(WIDTH))
        with torch.no_grad():
            for tensor in (*self.parameters(), self.offset):
                tensor.copy_(torch.rand(tensor.shape, generator=generator))


def random_program(seed: int, nodes: int) -> fx.GraphModule:
    """A graph of about that many computing nodes over two inputs; every value is (batch, WIDTH)."""
    draw = random.Random(seed)
    graph = fx.Graph()
    values = [graph.placeholder("x"), graph.placeholder("y")]
    modules = ["layers.0", "layers.1", "layers.2", "layers.0", "norm.0"]
    once = ["norm.1"]  # changes its buffers, so it may run in one stage only

    def pick() -> fx.Node:
        return draw.choice(values[-6:])

    def unary() -> fx.Node:
        function = draw.choice([torch.tanh, functional.relu, torch.sigmoid, torch.detach])
        return graph.call_function(function, (pick(),))

    def binary() -> fx.Node:
        return graph.call_function(draw.choice([operator.add, operator.mul, torch.maximum]), (pick(), pick()))

    def module() -> fx.Node:
        name = once.pop() if once and draw.random() < 0.2 else draw.choice(modules)
        return graph.call_module(name, (pick(),))

    def attribute() -> fx.Node:
        return graph.call_function(operator.mul, (pick(), graph.get_attr(draw.choice(["scale", "tied", "offset"]))))

    def number() -> fx.Node:
        value = pick()
        size = graph.call_method("size", (value, 0))
        return graph.call_method("reshape", (graph.call_method("flatten", (value,)), size, WIDTH))

    def pieces() -> fx.Node:
        halves = graph.call_method("chunk", (pick(), 2, 1))
        parts = [graph.call_function(operator.getitem, (halves, index)) for index in (1, 0)]
        return graph.call_function(torch.cat, (parts,), {"dim": 1})

    def mask() -> fx.Node:
        chosen = graph.call_function(operator.gt, (pick(), 0.3))
        return graph.call_function(torch.where, (chosen, pick(), pick()))

    makers = [unary, binary, module, attribute, number, pieces, mask]
    while sum(node.op.startswith("call_") for node in graph.nodes) < nodes:
        values.append(draw.choice(makers)())
    result = values[-1]
    for value in values[2:-1]:
        if not value.users and draw.random() < 0.5:
            result = graph.call_function(operator.add, (result, value))
    graph.output({"result": result, "early": values[2], "sum": (graph.call_method("sum", (result,)), 3)})
    return fx.GraphModule(Root(seed), graph)


def random_partition(graph: fx.Graph, stages: int, seed: int) -> dict[str, int]:
    """Any partition that respects the edges; with an even seed, intervals of the order."""
    draw = random.Random(seed)
    computed = [node for node in graph.nodes if node.op.startswith("call_")]
    stages = min(stages, len(computed))
    stage_of: dict[str, int] = {}
    if seed % 2 == 0:
        cuts = sorted(draw.sample(range(1, len(computed)), stages - 1)) if stages > 1 else []
        return {node.name: sum(place >= cut for cut in cuts) for place, node in enumerate(computed)}
    for node in computed:
        least = max((stage_of.get(source.name, 0) for source in node.all_input_nodes), default=0)
        stage_of[node.name] = draw.choice([least, least, min(least + 1, stages - 1)])
    present = sorted(set(stage_of.values()))
    return {name: present.index(stage) for name, stage in stage_of.items()}
