"""Runs the nodes of a graph alone, one after the other, on the values that the graph gives them: `NodesAlone`.

Nodes that do the same on values of the same shapes are measured once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import fx, nn

from torch_lms._torch_compat import tree_map
from torch_lms.profile.interpreter import describe_node
from torch_lms.profile.preserving import NodeError
from torch_lms.profile.storages import is_expanded, tensors_in

__all__ = ["Alone", "NodesAlone"]

_Found = TypeVar("_Found")
_PASSIVE = ("placeholder", "get_attr", "output")


@dataclass(frozen=True, kw_only=True)
class Alone:
    """A node that runs by itself.

    Attributes:
        values: what it reads that needs a gradient and depends on the model's inputs.
        weights: what it reads that needs a gradient and is made of nothing but weights and buffers.
        needs_gradient: whether its output does.
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

    def prepared(self) -> partial[Any]:
        """Its forward, once; on copies: a node that works in place must not change what comes after it, nor a leaf."""
        args, kwargs = tree_map(_copy, self.given)
        return partial(self._forward, args, kwargs)

    def _forward(self, args: Any, kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.needs_gradient), self.precision():
            return self.call(args, kwargs)


class NodesAlone(fx.Interpreter, Generic[_Found]):
    """Runs a graph forward under no gradient, and has each node that computes measured before that.

    Args:
        graph_module: what runs.
        measure: is given each node once.
        with_gradient: names of the nodes whose outputs need a gradient.
        precision: what forwards run under.
        advance: is called after each node.

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
    ) -> None:
        super().__init__(graph_module)
        self.found: dict[str, _Found] = {}
        self._measure, self._precision, self._advance = measure, precision, advance
        self._with_gradient = with_gradient
        self._of_weights: set[fx.Node] = set()
        self._known: dict[Any, _Found] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Measures a node, and runs it."""
        if n.op == "get_attr" or (n.all_input_nodes and self._of_weights.issuperset(n.all_input_nodes)):
            self._of_weights.add(n)
        try:
            if n.op not in _PASSIVE:
                key = self._key(n)
                if key not in self._known:
                    self._known[key] = self._measure(self._alone(n))
                self.found[n.name] = self._known[key]
            with torch.no_grad(), self._precision():
                value = super().run_node(n)
        except Exception as error:
            raise NodeError(describe_node(n)) from error
        self._advance()
        return value if n.op in _PASSIVE else tree_map(partial(_as_leaf, n.name in self._with_gradient), value)

    def _alone(self, node: fx.Node) -> Alone:
        values, weights = self._leaves(node)
        return Alone(
            values=values,
            weights=weights,
            needs_gradient=node.name in self._with_gradient,
            of_weights=node in self._of_weights,
            precision=self._precision,
            call=partial(getattr(self, node.op), node.target),
            given=self.fetch_args_kwargs_from_env(node),
        )

    def _leaves(self, node: fx.Node) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        values: dict[int, torch.Tensor] = {}
        weights: dict[int, torch.Tensor] = {}
        for source in node.all_input_nodes:
            kind = weights if source in self._of_weights else values
            kind.update({id(one): one for one in tensors_in(self.env[source]) if one.requires_grad})
        if node.op == "call_module":
            module = self.fetch_attr(str(node.target))
            weights.update({id(one): one for one in module.parameters() if one.requires_grad})
        return list(values.values()), list(weights.values())

    def _key(self, node: fx.Node) -> Any:
        """Equal for nodes that do the same on values of the same shapes."""
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        module = self.fetch_attr(str(node.target)) if node.op == "call_module" else None
        own = "" if module is None else f"{module!r} {[_looks(one) for one in module.parameters()]}"
        target = node.target if module is None else type(module)
        roles = [source in self._of_weights for source in node.all_input_nodes]
        needs = node.name in self._with_gradient
        return node.op, target, own, needs, str(roles), str(tree_map(_looks, (args, dict(kwargs))))


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
