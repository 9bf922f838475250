"""Runs the nodes of a graph alone, one after the other, on the values that the graph gives them: `NodesAlone`.

Nodes that do the same on values of the same shapes are measured once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import fx, nn

from torch_lms._torch_compat import storage_key, tree_map
from torch_lms.profile.aliases import written
from torch_lms.profile.interpreter import describe_node
from torch_lms.profile.node_facts import PASSIVE_OPS
from torch_lms.profile.preserving import NodeError
from torch_lms.profile.storages import dense_parts, is_expanded, tensors_in

__all__ = ["Alone", "NodesAlone", "Prepared", "called_module", "leaves_of", "nodes_of_weights", "work_of"]

_Found = TypeVar("_Found")


@dataclass(frozen=True, kw_only=True)
class Alone:
    """A node that runs by itself.

    Attributes:
        values: what it reads that needs a gradient and depends on the model's inputs.
        weights: what it reads that needs a gradient and is made of nothing but weights and buffers.
        needs_gradient: whether its output does, or what it writes to.
        of_weights: whether it reads nothing but weights and buffers.
        precision: what its forward runs under.
        call: the node, for arguments.
        given: its arguments.
    """

    values: Sequence[torch.Tensor]
    weights: Sequence[torch.Tensor]
    needs_gradient: bool
    of_weights: bool
    precision: Callable[[], AbstractContextManager[Any]]
    call: Callable[..., Any]
    given: tuple[Any, Any]


def nodes_of_weights(graph: fx.Graph) -> frozenset[fx.Node]:
    """Those that read nothing but weights and buffers, such as a view of a weight."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "get_attr" or (node.all_input_nodes and found.issuperset(node.all_input_nodes)):
            found.add(node)
    return frozenset(found)


def called_module(interpreter: fx.Interpreter, node: fx.Node) -> nn.Module | None:
    """The module that a node calls."""
    found: nn.Module | None = interpreter.fetch_attr(str(node.target)) if node.op == "call_module" else None
    return found


def leaves_of(
    node: fx.Node,
    of_weights: Collection[fx.Node],
    given: Callable[[fx.Node], Iterable[torch.Tensor]],
    module: nn.Module | None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What a node reads that needs a gradient: values and weights, as `Alone` has them.

    Args:
        node: that reads.
        of_weights: the nodes that read nothing but weights and buffers.
        given: the tensors that it is given of another node.
        module: that it calls.
    """
    values: dict[int, torch.Tensor] = {}
    weights: dict[int, torch.Tensor] = {}
    for source in node.all_input_nodes:
        kind = weights if source in of_weights else values
        kind.update({id(one): one for one in given(source) if one.requires_grad})
    if module is not None:
        weights.update({id(one): one for one in module.parameters() if one.requires_grad})
    return list(values.values()), list(weights.values())


def work_of(node: fx.Node, module: nn.Module | None, roles: Sequence[bool], given: tuple[Any, Any]) -> Any:
    """A key: equal for nodes that do the same on values of the same shapes.

    Args:
        node: that runs.
        module: that it calls.
        roles: of each node that it reads, whether that is made of nothing but weights and buffers.
        given: its arguments.
    """
    own = "" if module is None else f"{module!r} {[_looks(one) for one in module.parameters()]}"
    args, kwargs = given
    looks = str(tree_map(_looks, (args, dict(kwargs))))
    return node.op, node.target if module is None else type(module), own, tuple(roles), looks


class Prepared:
    """A node's forward, once; on copies: a node that works in place must not change what comes after it, nor a leaf.

    Args:
        node: what is called.

    Attributes:
        given: the tensors that it is given.
        roots: where its backward begins, after it: its outputs, and what it has written to.
    """

    def __init__(self, node: Alone) -> None:
        self._node = node
        self._args, self._kwargs = tree_map(_copy, node.given)
        self.given = list(tensors_in((self._args, self._kwargs)))
        self._functions = [one.grad_fn for one in self.given]
        self.roots: list[torch.Tensor] = []

    def __call__(self) -> Any:
        """Runs it, and returns its output."""
        with torch.set_grad_enabled(self._node.needs_gradient), self._node.precision():
            output = self._node.call(self._args, self._kwargs)
        pairs = zip(self.given, self._functions, strict=True)
        made = [*tensors_in(output), *(one for one, function in pairs if one.grad_fn is not function)]
        self.roots = list({id(one): one for one in made if one.requires_grad and one.grad_fn is not None}.values())
        return output


class NodesAlone(fx.Interpreter, Generic[_Found]):
    """Runs a graph forward under no gradient, and has each node that computes measured before that.

    Args:
        graph_module: what runs.
        measure: is given each node once.
        with_gradient: names of the nodes whose outputs need a gradient.
        precision: what forwards run under.
        advance: is called after each node.
        inside: names of the nodes whose forward runs a backward: these run with gradients, and are not measured, since
            PyTorch crashes under a mode of dispatch in some of them.

    Attributes:
        found: what `measure` returned, by the nodes' names.
    """

    def __init__(
        self,
        graph_module: fx.GraphModule,
        measure: Callable[[Alone], _Found],
        with_gradient: Collection[str],
        precision: Callable[[], AbstractContextManager[Any]],
        advance: Callable[[], None],
        inside: Collection[str] = (),
    ) -> None:
        super().__init__(graph_module)
        self._inside = inside
        self.found: dict[str, _Found] = {}
        self._measure, self._precision, self._advance = measure, precision, advance
        self._with_gradient = with_gradient
        self._of_weights = nodes_of_weights(graph_module.graph)
        self._modules = dict(graph_module.named_modules(remove_duplicate=False))
        self._known: dict[Any, _Found] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Measures a node, and runs it."""
        try:
            into = self._written_with_gradient(n)
            needs_gradient = n.name in self._with_gradient or bool(into)
            if n.op not in PASSIVE_OPS and n.name not in self._inside:
                args, kwargs = self.fetch_args_kwargs_from_env(n)
                roles = [source in self._of_weights for source in n.all_input_nodes]
                key = needs_gradient, work_of(n, called_module(self, n), roles, (args, kwargs))
                if key not in self._known:
                    self._known[key] = self._measure(self._alone(n, needs_gradient))
                self.found[n.name] = self._known[key]
            with torch.set_grad_enabled(n.name in self._inside), self._precision():
                value = super().run_node(n)
            self._give_gradients(into)
        except Exception as error:
            raise NodeError(describe_node(n)) from error
        self._advance()
        return value if n.op in PASSIVE_OPS else tree_map(partial(_as_leaf, n.name in self._with_gradient), value)

    def _alone(self, node: fx.Node, needs_gradient: bool) -> Alone:
        module = called_module(self, node)
        values, weights = leaves_of(node, self._of_weights, lambda source: tensors_in(self.env[source]), module)
        return Alone(
            values=values,
            weights=weights,
            needs_gradient=needs_gradient,
            of_weights=node in self._of_weights,
            precision=self._precision,
            call=partial(getattr(self, node.op), node.target),
            given=self.fetch_args_kwargs_from_env(node),
        )

    def _written_with_gradient(self, node: fx.Node) -> list[torch.Tensor]:
        """What a node writes to that has a gradient after that."""
        values = [self.env[one] for one in written(node, self._modules) if one in self.env]
        into = [one for one in tensors_in(values) if one.is_floating_point() or one.is_complex()]
        given = (self.env[one] for one in node.all_input_nodes) if into else ()
        return into if any(one.requires_grad for value in given for one in tensors_in(value)) else []

    def _give_gradients(self, written_to: Sequence[torch.Tensor]) -> None:
        """All that shares memory with what a node has written to has a gradient from there on, as in the model."""
        keys = {storage_key(part) for one in written_to for part in dense_parts(one)}
        for other, value in self.env.items() if keys else ():
            for one in tensors_in(value) if other.op != "get_attr" else ():
                if keys.intersection(map(storage_key, dense_parts(one))):
                    one.requires_grad_()


def _as_leaf(needs_gradient: bool, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(needs_gradient and (value.is_floating_point() or value.is_complex()))


def _looks(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    stride = value.stride() if value.layout == torch.strided else None
    return tuple(value.shape), stride, str(value.dtype), value.requires_grad


def _copy(value: Any) -> Any:
    """Of what is expanded a view, for that may be far larger than memory is, and nothing works on it in place."""
    if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter):
        return value
    return value.view_as(value) if is_expanded(value) else value.clone()
