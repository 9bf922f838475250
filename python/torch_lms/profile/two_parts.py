"""Times the two parts of a backward that zero bubble splits: gradients of values first, those of weights later.

Each node of the graph that reads weights runs alone, on the values that the graph gives it. Only where it gets values
and weights are there two parts; what has no weights has nothing in the second, what has no values nothing in the first.
Nodes that do the same on values of the same shapes are timed once. The two parts may take longer than the whole: what
both need is computed twice.

What `torch.distributed.pipelining` computes in each part is told in ``weight_meetings``.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from torch_lms._torch_compat import tree_map
from torch_lms.profile.interpreter import describe_node
from torch_lms.profile.preserving import NodeError
from torch_lms.profile.storages import tensors_in
from torch_lms.profile.timing import Clock

__all__ = ["NO_WEIGHTS", "PartShares", "TwoPartRun", "TwoParts"]

_WARMUP_RUNS, _TIMED_RUNS = 2, 8


class PartShares(NamedTuple):
    """Of the time of a node's whole backward, what each of its two parts takes."""

    inputs: float
    weights: float


NO_WEIGHTS, _NO_VALUES = PartShares(1.0, 0.0), PartShares(0.0, 1.0)


@dataclass(frozen=True)
class TwoPartRun:
    """What timing two parts needs.

    Attributes:
        clock: of the device that runs.
        with_gradient: names of the nodes whose outputs need a gradient.
        accumulate: whether gradients of weights are added to others.
        precision: what forwards run under.
        advance: is called after each node.
    """

    clock: Clock
    with_gradient: Collection[str]
    accumulate: bool
    precision: Callable[[], AbstractContextManager[Any]]
    advance: Callable[[], None]


class TwoParts(fx.Interpreter):
    """Runs a graph forward and times both parts of the backward of each node that has two.

    Attributes:
        shares: of each node whose output needs a gradient.
    """

    def __init__(self, graph_module: fx.GraphModule, run: TwoPartRun) -> None:
        super().__init__(graph_module)
        self.shares: dict[str, PartShares] = {}
        self._run = run
        self._of_weights: set[fx.Node] = set()  # made of nothing but weights and buffers
        self._known: dict[Any, PartShares] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Runs a node under no gradient, and times its backward before that."""
        if n.op == "get_attr" or (n.all_input_nodes and self._of_weights.issuperset(n.all_input_nodes)):
            self._of_weights.add(n)
        try:
            if n.name in self._run.with_gradient and n.op not in ("placeholder", "get_attr", "output"):
                self.shares[n.name] = self._shares(n)
            with torch.no_grad(), self._run.precision():
                value = super().run_node(n)
        except Exception as error:
            raise NodeError(describe_node(n)) from error
        self._run.advance()
        if n.op in ("placeholder", "get_attr", "output"):
            return value
        return tree_map(partial(_as_leaf, n.name in self._run.with_gradient), value)

    def _shares(self, node: fx.Node) -> PartShares:
        values, weights = self._leaves(node)
        if not weights:
            return NO_WEIGHTS
        if not values or node in self._of_weights:
            return _NO_VALUES
        key = self._key(node)
        if key not in self._known:
            self._known[key] = self._timed(node, values, weights)
        return self._known[key]

    def _leaves(self, node: fx.Node) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What the node reads that needs a gradient: values, and weights or what is made of these."""
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
        return node.op, target, own, str(roles), str(tree_map(_looks, (args, dict(kwargs))))

    def _timed(self, node: fx.Node, values: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> PartShares:
        given = self.fetch_args_kwargs_from_env(node)

        def forward() -> Any:
            # Of copies: a node that works in place must not change what comes after it, nor a leaf.
            args, kwargs = fx.node.map_aggregate(given, _copy)
            return getattr(self, node.op)(node.target, args, kwargs)

        sums = [torch.zeros_like(one) for one in weights] if self._run.accumulate else []
        backwards = _Backwards(forward, values, weights, sums)
        for _ in range(_WARMUP_RUNS):
            backwards.time(self._run)
        found = [backwards.time(self._run) for _ in range(_TIMED_RUNS)]
        whole, inputs, own = (statistics.median(times) for times in zip(*found, strict=True))
        return PartShares(inputs / whole, own / whole) if whole > 0 else _NO_VALUES


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
    return value.clone() if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) else value


@dataclass(frozen=True)
class _Backwards:
    """The backwards of one node: the whole, and its two parts."""

    forward: Callable[[], Any]
    values: Sequence[torch.Tensor]
    weights: Sequence[torch.Tensor]
    sums: Sequence[torch.Tensor]

    def time(self, run: TwoPartRun) -> tuple[float, float, float]:
        """Microseconds of the whole, of the gradients of values, and of those of weights."""
        with torch.enable_grad(), run.precision():
            outputs = [one for one in tensors_in(self.forward()) if one.requires_grad and one.grad_fn is not None]
        gradients = [torch.ones_like(one) for one in outputs]
        run.clock.lead()
        marks = [run.clock.mark()]
        for asked, last in (([*self.values, *self.weights], False), (self.values, False), (self.weights, True)):
            found = torch.autograd.grad(outputs, asked, gradients, retain_graph=not last, allow_unused=True)
            for own, gradient in zip(self.sums, found[-len(self.weights) :], strict=False):
                if asked is not self.values and gradient is not None:
                    own.add_(gradient)
            marks.append(run.clock.mark())
        run.clock.wait()
        whole, inputs, own_us = (run.clock.elapsed_us(*pair) for pair in itertools.pairwise(marks))
        return whole, inputs, own_us
