"""Runs a graph node by node under a watcher: `ProfilingInterpreter`, as the RFC names it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn

from torch_lms._torch_compat import named_parameters_with_ties
from torch_lms.errors import ProfileError
from torch_lms.profile.arguments import bind_sample
from torch_lms.profile.constraints import find_constraints, find_writes, written_attributes
from torch_lms.profile.generators import generators_kept, generators_of
from torch_lms.profile.node_facts import NodeFacts, Watcher
from torch_lms.profile.ownership import module_of
from torch_lms.profile.preserving import NodeError, contents_kept, run_or_explain
from torch_lms.profile.storages import tensor_bytes, tensors_in
from torch_lms.profile.tracing import TracedModel, trace_sample
from torch_lms.profile.writes import parameters_unwritten

__all__ = ["ProfilingInterpreter", "describe_node", "graph_facts", "trace_undone"]


class ProfilingInterpreter(fx.Interpreter):
    """Runs a graph under a watcher; by itself it times each node and notes sizes, as in the RFC.

        interpreter = ProfilingInterpreter(trace(model, (x,)))
        interpreter.run(x)
        interpreter.execution_times_sec["linear"]

    Args:
        traced: what to run; needs a graph.
        watcher: sees each node; None times them with a plain clock.

    Attributes:
        execution_times_sec: of each node of the last run.
        activation_sizes: bytes of the tensors that each node gave.
    """

    def __init__(self, traced: TracedModel | nn.Module, watcher: Watcher | None = None) -> None:
        self._traced = traced if isinstance(traced, TracedModel) else None
        self._module = traced if isinstance(traced, nn.Module) else None
        self.execution_times_sec: dict[str, float] = {}
        self._parameter_sizes: dict[str, int] = {}
        self.activation_sizes: dict[str, int] = {}
        self._watcher: Watcher = watcher or _PlainClock(self)
        if self._traced is not None:
            self._open(self._traced)

    def _open(self, traced: TracedModel) -> None:
        if traced.graph_module is None:
            raise ProfileError(
                f"expected a model with a graph, found {traced.name}, which has none: {'; '.join(traced.notes)}; "
                "use torch_lms.profile.profile, which falls back to the ops as they run"
            )
        super().__init__(traced.graph_module)

    @property
    def parameter_sizes(self) -> dict[str, int]:
        """Bytes of the parameters that each node reads; looked up when it is asked for, which takes a while."""
        if self._traced is not None and not self._parameter_sizes:
            sizes = {name: tensor_bytes(value) for name, value in named_parameters_with_ties(self._traced.model)}
            for facts in graph_facts(self._traced):
                self._parameter_sizes[facts.name] = sum(sizes[name] for name in facts.parameters)
        return self._parameter_sizes

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the graph once on the model's arguments; a plain module is traced for them first."""
        if self._traced is None:
            assert self._module is not None
            self._traced = trace_sample(
                self._module, bind_sample(self._module, args, kwargs), sources=("symbolic", "export", "opened")
            )
            self._open(self._traced)
        return self.run_flat(*self._traced.arguments(args, kwargs))

    def run_flat(self, *tensors: Any) -> Any:
        """Runs the graph once on its own arguments."""
        return super().run(*tensors)

    def run_node(self, n: fx.Node) -> Any:
        """Runs a node under the watcher."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        method = getattr(self, n.op)
        if n.op == "output":
            return method(n.target, args, kwargs)
        try:
            return self._watcher.watch(n.name, lambda: method(n.target, args, kwargs))
        except Exception as error:
            raise NodeError(describe_node(n)) from error

    def get_costs(self) -> dict[str, float]:
        """Seconds of each module of the last run, by qualified name, in the order of execution."""
        assert self._traced is not None
        costs: dict[str, float] = defaultdict(float)
        for facts in graph_facts(self._traced):
            if facts.name in self.execution_times_sec:
                costs[facts.module] += self.execution_times_sec[facts.name]
        return dict(costs)


class _PlainClock:
    """The RFC's own measurement: the time of each call, once its device is done."""

    def __init__(self, interpreter: ProfilingInterpreter) -> None:
        self._into = interpreter

    def watch(self, name: str, run: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        value = run()
        found = list(tensors_in(value))
        for device in {tensor.device for tensor in found if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        self._into.execution_times_sec[name] = time.perf_counter() - start
        self._into.activation_sizes[name] = sum(tensor_bytes(tensor) for tensor in found)
        return value


def describe_node(node: fx.Node) -> str:
    """A node, its module and the user's line, as far as they are known, for messages."""
    path = module_of(node)
    lines = [line.strip() for line in str(node.meta.get("stack_trace") or "").splitlines()]
    text = f"node {node.name!r}" + (f" of module {path!r}" if path else "")
    return text + (f" ({' '.join(lines[-2:])})" if lines else "")


def graph_facts(traced: TracedModel) -> list[NodeFacts]:
    """What a graph says of its nodes, in order."""
    assert traced.graph_module is not None
    modules = dict(traced.graph_module.named_modules(remove_duplicate=False))
    attributes = _attribute_names(traced)
    not_before: dict[fx.Node, dict[str, None]] = defaultdict(dict)
    for one in find_constraints(traced.graph_module.graph, modules):
        not_before[one.then][one.first.name] = None
    writes = find_writes(traced.graph_module.graph, modules)
    return [
        replace(_facts(node, modules, attributes), not_before=tuple(not_before[node]), writes=writes.get(node, ()))
        for node in traced.graph_module.graph.nodes
    ]


@contextmanager
def trace_undone(traced: TracedModel) -> Iterator[None]:
    """Puts back the parameters that the graph changes, or may, and the generators that it has as constants.

    Without a graph the parameters are those that one run changes; all else that this run does stays, as what the model
    makes in its first one alone.
    """
    generators = generators_of(traced.graph_module) if traced.graph_module is not None else []
    with generators_kept(generators), contents_kept(_written_parameters(traced)):
        yield


def _written_parameters(traced: TracedModel) -> list[nn.Parameter]:
    if traced.graph_module is None:
        model, sample = traced.model, traced.sample
        with parameters_unwritten(model) as written, torch.enable_grad():
            run_or_explain(model, sample, partial(sample.call, model, sample.leaves()))
        return written
    modules = dict(traced.graph_module.named_modules(remove_duplicate=False))
    names = frozenset().union(*written_attributes(traced.graph_module.graph, modules).values())
    own = named_parameters_with_ties(traced.graph_module)
    return list({id(parameter): parameter for name, parameter in own if name in names}.values())


@dataclass(frozen=True)
class _Attributes:
    """The model's names of what the graph's modules hold, by identity; tied ones under their first name."""

    parameters: dict[int, str]
    buffers: dict[int, str]

    def split(self, tensors: list[torch.Tensor]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the parameters and of the buffers among some tensors."""
        return tuple(
            tuple(dict.fromkeys(names[id(tensor)] for tensor in tensors if id(tensor) in names))
            for names in (self.parameters, self.buffers)
        )  # type: ignore[return-value]


def _attribute_names(traced: TracedModel) -> _Attributes:
    found = _Attributes({}, {})
    for name, parameter in named_parameters_with_ties(traced.model):
        found.parameters.setdefault(id(parameter), name)
    for name, buffer in traced.model.named_buffers():
        found.buffers.setdefault(id(buffer), name)
    return found


def _facts(node: fx.Node, modules: dict[str, nn.Module], attributes: _Attributes) -> NodeFacts:
    tensors: list[torch.Tensor] = []
    if node.op == "call_module":
        module = modules[str(node.target)]
        tensors += [*module.parameters(), *module.buffers()]
    if node.op != "output":
        for source in node.all_input_nodes:
            if source.op == "get_attr":
                tensors += tensors_in(attrgetter(str(source.target))(modules[""]))
    parameters, buffers = attributes.split(tensors)
    return NodeFacts(
        name=node.name,
        op=node.op,
        target=node.target if isinstance(node.target, str) else _target_name(node.target),
        inputs=tuple(source.name for source in node.all_input_nodes),
        module=module_of(node),
        parameters=parameters,
        buffers=buffers,
    )


def _target_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload if hasattr(torch._ops, "OpOverload") else ()):
        return str(target)
    module = getattr(target, "__module__", None) or ""
    return f"{module}.{getattr(target, '__name__', target)}".lstrip(".")
