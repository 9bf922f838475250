"""Random models that work in place: on values, views, elements of tuples, inputs and buffers."""

from __future__ import annotations

import operator
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from torch_lms.partition import CostGraph, CostModel, CostNode, DeviceSpec, LinkSpec, PartitionProblem
from torch_lms.profile.arguments import bind_sample
from torch_lms.profile.interpreter import graph_facts
from torch_lms.profile.tracing import TracedModel

__all__ = ["ROWS", "WIDTH", "Root", "problem_of", "random_writes"]

ROWS, WIDTH = 4, 3


class Root(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.relu = nn.ReLU(inplace=True)
        self.register_buffer("count", torch.zeros(WIDTH))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator))


class _Writer:
    """Adds nodes to a graph; every value is (ROWS, WIDTH), or one row of that."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.graph = fx.Graph()
        self.values = [self.graph.placeholder("x"), self.graph.placeholder("y")]
        self.rows: list[fx.Node] = []

    def pick(self) -> fx.Node:
        return self.draw.choice(self.values[-7:])

    def either(self) -> fx.Node:
        return self.draw.choice([*self.values[-7:], *self.rows[-3:]])

    def fresh(self) -> None:
        kind = self.draw.randrange(4)
        if kind == 0:
            made = self.graph.call_function(operator.mul, (self.pick(), 2.0))
        elif kind == 1:
            made = self.graph.call_function(operator.add, (self.pick(), self.either()))
        elif kind == 2:
            made = self.graph.call_module(self.draw.choice(["layers.0", "layers.1", "norm"]), (self.pick(),))
        else:
            made = self.graph.call_function(operator.mul, (self.pick(), self.graph.call_method("sum", (self.pick(),))))
        self.values.append(made)

    def view(self) -> None:
        kind, value = self.draw.randrange(6), self.pick()
        if kind == 0:
            self.rows.append(self.graph.call_function(operator.getitem, (value, slice(1, 2))))
            return
        if kind == 1:
            halves = self.graph.call_method("chunk", (value, 2, 0))
            parts = [self.graph.call_function(operator.getitem, (halves, index)) for index in range(2)]
            self.values.append(self.graph.call_function(torch.cat, (parts,)))
            return
        if kind == 2:
            made = self.graph.call_method("t", (self.graph.call_method("t", (value,)),))
        else:
            function = [torch.flatten, torch.reshape, torch.detach][kind - 3]
            made = self.graph.call_function(function, (value, (ROWS, WIDTH)) if kind == 4 else (value,))
            made = self.graph.call_method("view", (made, ROWS, WIDTH)) if kind == 3 else made
        self.values.append(made)

    def write(self) -> None:
        kind, value = self.draw.randrange(7), self.either()
        if kind == 0:
            made = self.graph.call_method("add_", (value, 1.0))
        elif kind == 1:
            made = self.graph.call_function(operator.imul, (value, 0.5))
        elif kind == 2:
            self.graph.call_function(operator.setitem, (value, slice(0, 1), 0.25))
            return
        elif kind == 3:
            made = self.graph.call_function(functional.relu, (value,), {"inplace": True})
        elif kind == 4:
            made = self.graph.call_module("relu", (value,))
        elif kind == 5:
            made = self.graph.call_method("add_", (value, self.draw.choice(self.rows or [value])))
        else:
            empty = self.graph.call_function(torch.empty_like, (value,))
            self.graph.call_method("copy_", (empty, value))
            made = self.graph.call_method("clamp_", (empty, 0.1))
        (self.rows if value in self.rows else self.values).append(made)

    def count(self) -> None:
        buffer = self.graph.get_attr("count")
        if self.draw.random() < 0.5:
            self.graph.call_method("add_", (self.graph.call_method("view", (buffer, -1)), 1.0))
        self.values.append(self.graph.call_function(operator.add, (self.pick(), buffer)))

    def finish(self) -> fx.Graph:
        computed = [value for value in self.values if value.op != "placeholder"] or self.values
        result = self.graph.call_function(operator.add, (computed[-1], self.pick()))
        for value in computed:
            if self.draw.random() < 0.4:
                result = self.graph.call_function(operator.add, (result, value))
        self.graph.output({"result": result, "more": (self.pick(), self.either())})
        return self.graph


def random_writes(seed: int, nodes: int) -> fx.GraphModule:
    """A graph of about that many computing nodes over two inputs; some of these graphs cannot run."""
    made = _Writer(seed)
    while sum(node.op.startswith("call_") for node in made.graph.nodes) < nodes:
        made.draw.choice([made.fresh, made.fresh, made.view, made.write, made.write, made.count])()
    return fx.GraphModule(Root(seed), made.finish())


def problem_of(program: fx.GraphModule, stages: int, seed: int, saves: bool = False) -> PartitionProblem:
    """The problem of cutting a graph module, with invented costs; each node may save a storage of its own."""
    draw = random.Random(seed)
    inputs = [torch.zeros(ROWS, WIDTH) for node in program.graph.nodes if node.op == "placeholder"]
    traced = TracedModel(program, "operator", program, bind_sample(program, inputs, {}))
    nodes = tuple(
        CostNode(
            name=facts.name,
            kind=facts.op if facts.op in ("placeholder", "get_attr", "output") else facts.target,
            inputs=tuple(dict.fromkeys(facts.inputs)),
            element=facts.target.endswith("getitem"),
            not_before=facts.not_before,
            writes=facts.writes,
            module=facts.module,
            forward_us=draw.choice([0.0, draw.random()]),
            backward_us=draw.random(),
            output_bytes=draw.randint(1, 20),
            gradient_bytes=8 if facts.op.startswith("call_") else 0,
            saved=(facts.name,) if saves and facts.op.startswith("call_") else (),
        )
        for facts in graph_facts(traced)
    )
    devices = tuple(DeviceSpec(name=f"d{index}") for index in range(stages))
    link = LinkSpec(bytes_per_us=100.0)
    graph = CostGraph(nodes=nodes, storage_bytes={id_: 100 for node in nodes for id_ in node.saved})
    return PartitionProblem(graph=graph, devices=devices, links=link, cost_model=CostModel(microbatches=4))


def outcome(run: Any, parameters: Sequence[nn.Parameter]) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """What two steps give, and the gradients."""
    given_ = []
    for _ in range(2):
        found = run()
        given_ += [found["result"], *found["more"]]
        if found["result"].requires_grad:
            found["result"].sum().backward()
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return [value.detach().clone() for value in given_], gradients


def assert_same(found: Any, expected: Any, exact: bool) -> None:
    for one, other in zip(found[0], expected[0], strict=True):
        assert torch.equal(one, other)
    for one, other in zip(found[1], expected[1], strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert torch.equal(one, other) if exact else torch.allclose(one, other, rtol=1e-4, atol=1e-5)
