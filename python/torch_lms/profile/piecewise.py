"""Profiles a model that is larger than its device: parameters and values come to the device node by node.

Each node runs alone: its parameters and inputs are brought to the device, it runs forward and backward as often as it
is timed, and its outputs go back to the host. No more than one node is ever on the device. Sizes are noted in the first
run, the working space is measured in one of its own. Nodes that do the same on values of the same shapes, as those of
equal layers, are measured once; modules of somebody's own are taken to be different.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from torch_lms._torch_compat import storage_key, tree_map
from torch_lms.errors import ProfileError
from torch_lms.profile.alone import Alone, called_module, leaves_of, nodes_of_weights, work_of
from torch_lms.profile.interpreter import describe_node
from torch_lms.profile.preserving import NodeError, forget_gradients, placed_on
from torch_lms.profile.sizes import SizeWatcher
from torch_lms.profile.steps import backward_of
from torch_lms.profile.storages import StorageNames, tensors_in
from torch_lms.profile.timing import RunTimer
from torch_lms.profile.tracing import TracedModel
from torch_lms.profile.working_space import NOT_MEASURED, WorkingSpace, working_space

__all__ = ["PieceByPiece", "Pieces"]


@dataclass(frozen=True)
class Pieces:
    """What a run piece by piece needs.

    Attributes:
        device: where each node runs.
        warmup_runs: of each node.
        timed_runs: of each node.
        storages: names of storages; copies get the names of their originals.
        sizes: notes the sizes.
        timer: notes the times.
        advance: is called after each node.
        precision: what each forward of a node runs under.
    """

    device: torch.device
    warmup_runs: int
    timed_runs: int
    storages: StorageNames
    sizes: SizeWatcher
    timer: RunTimer
    advance: Callable[[], None]
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext


class PieceByPiece(fx.Interpreter):
    """Runs a graph whose parameters and values stay where they are, each node on another device.

    Args:
        traced: the graph.
        pieces: where and how often nodes run.

    Attributes:
        spaces: the working space of each node that computes, by its name.

    Raises:
        ProfileError: if there is no graph.
    """

    def __init__(self, traced: TracedModel, pieces: Pieces) -> None:
        if traced.graph_module is None:
            raise ProfileError(
                f"expected a model with a graph to run it piece by piece, found {traced.name}, which has none: "
                f"{'; '.join(traced.notes)}; use a device that it fits"
            )
        super().__init__(traced.graph_module)
        self.spaces: dict[str, WorkingSpace] = {}
        self._pieces = pieces
        self._of_weights = nodes_of_weights(traced.graph_module.graph)
        self._first: dict[Any, str] = {}  # the first node that does some work

    def run_node(self, n: fx.Node) -> Any:
        """Runs a node as often as it is timed; gives its value on the host."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        method = getattr(self, n.op)
        if n.op == "output":
            return method(n.target, args, kwargs)
        pieces = self._pieces
        if n.op in ("placeholder", "get_attr") or isinstance(n.target, type):  # nothing is computed
            return pieces.sizes.watch(n.name, partial(method, n.target, args, kwargs))
        try:
            with ExitStack() as stack:
                if (module := called_module(self, n)) is not None:
                    self._bring_module(stack, module)
                node = _NodeOnDevice(pieces, n.name, partial(method, n.target), args, kwargs)
                work = self._work(n, (args, kwargs))
                value = node.run()
                self._measure(n, node, value, work)
        except Exception as error:
            raise NodeError(describe_node(n)) from error
        pieces.advance()
        return value

    def _work(self, n: fx.Node, given: tuple[Any, Any]) -> Any:
        """A key of what a node does; before it runs, for it may change what it is given."""
        module = called_module(self, n)
        if module is not None and not type(module).__module__.startswith("torch."):
            return n
        return work_of(n, module, [source in self._of_weights for source in n.all_input_nodes], given)

    def _measure(self, n: fx.Node, node: _NodeOnDevice, value: Any, work: Any) -> None:
        """Times and working space, of a node that has run."""
        first = self._first.setdefault(work, n.name)
        if first == n.name:
            node.time()
            self.spaces[n.name] = self._space(n, node, value)
        else:
            self._pieces.timer.repeat(first, n.name)
            self.spaces[n.name] = self.spaces[first]

    def _space(self, n: fx.Node, node: _NodeOnDevice, value: Any) -> WorkingSpace:
        if n.name in self._pieces.sizes.inside:
            return NOT_MEASURED  # as of `NodesAlone`
        module = called_module(self, n)
        values, weights = leaves_of(n, self._of_weights, lambda source: node.brought(self.env[source]), module)
        return node.working_space(values, weights, n in self._of_weights, value)

    def _bring_module(self, stack: ExitStack, module: nn.Module) -> None:
        storages = self._pieces.storages
        names = [(tensor, storages.model_names(tensor)) for tensor in [*module.parameters(), *module.buffers()]]
        stack.enter_context(placed_on(module, self._pieces.device))
        stack.callback(forget_gradients, module)  # those of all modules would not fit
        for tensor, own in names:
            for name in own:
                storages.alias_model(tensor, name)


class _NodeOnDevice:
    """One node, its inputs on the device."""

    def __init__(self, pieces: Pieces, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._pieces = pieces
        self._name = name
        self._call = call
        self._args = args
        self._kwargs = kwargs
        self._inputs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._writes_to_gradient = False
        for tensor in tensors_in((args, kwargs)):
            if id(tensor) not in self._inputs:
                self._inputs[id(tensor)] = (tensor, self._bring(tensor))

    def brought(self, value: Any) -> list[torch.Tensor]:
        """What the node is given in place of the tensors of a value."""
        return [self._inputs[id(one)][1] for one in tensors_in(value) if id(one) in self._inputs]

    def working_space(
        self, values: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], of_weights: bool, value: Any
    ) -> WorkingSpace:
        """What it needs while it runs; after `run`, which has returned a value."""
        args, kwargs = fx.node.map_aggregate((self._args, self._kwargs), self._given)
        node = Alone(
            values=values,
            weights=weights,
            needs_gradient=self._writes_to_gradient or any(one.requires_grad for one in tensors_in(value)),
            of_weights=of_weights,
            precision=self._pieces.precision,
            call=self._call,
            given=(args, kwargs),
        )
        return working_space(self._pieces.device, node)

    def _given(self, value: Any) -> Any:
        return self._inputs[id(value)][1] if id(value) in self._inputs else value

    def _bring(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(self._pieces.device).requires_grad_(tensor.requires_grad)

    def _copies(self) -> dict[int, torch.Tensor]:
        """Inputs that the node may change in place."""
        copies = {}
        for key, (host, leaf) in self._inputs.items():
            copies[key] = leaf if isinstance(host, nn.Parameter) else leaf.clone()
            self._alias(copies[key], host)
        return copies

    def _alias(self, copy: torch.Tensor, host: torch.Tensor) -> None:
        storages = self._pieces.storages
        for name in storages.model_names(host):
            storages.alias_model(copy, name)
        for name in storages.names(host, self._name):
            storages.alias(copy, name)

    def run(self) -> Any:
        """The first run, for sizes; gives the value on the host."""
        value, copies = self._run(self._pieces.sizes.watch)
        self._pieces.sizes.forget_values()  # they would keep this node's inputs on the device
        self._write_back(copies)
        return tree_map(partial(self._to_host, copies), value)

    def time(self) -> None:
        """Warm-up and timed runs, forward and backward."""
        timer = self._pieces.timer
        for runs, keep in ((self._pieces.warmup_runs, False), (self._pieces.timed_runs, True)):
            for run in range(runs):
                if run:
                    timer.next_run()
                result, _ = self._run(timer.watch)
                backward = backward_of(result)
                if backward is not None:
                    timer.backward(backward)
                for _, leaf in self._inputs.values():
                    leaf.grad = None
            timer.finish_runs(keep)

    def _run(self, watch: Callable[[str, Callable[[], Any]], Any]) -> tuple[Any, dict[int, torch.Tensor]]:
        copies = self._copies()

        def swap(value: Any) -> Any:
            return copies.get(id(value), value) if isinstance(value, torch.Tensor) else value

        args, kwargs = fx.node.map_aggregate((self._args, self._kwargs), swap)
        with self._pieces.precision():
            return watch(self._name, lambda: self._call(args, kwargs)), copies

    def _write_back(self, copies: Mapping[int, torch.Tensor]) -> None:
        """Changes the host's values as the node has changed its inputs in place."""
        for key, (host, _) in self._inputs.items():
            if copies[key]._version and not isinstance(host, nn.Parameter):
                host.detach().copy_(copies[key].detach())
                host.requires_grad_(copies[key].requires_grad)
                self._writes_to_gradient |= host.requires_grad

    def _to_host(self, copies: Mapping[int, torch.Tensor], item: Any) -> Any:
        """A value on the host; a view of an input becomes a view of the host's, so that later changes meet both."""
        if not isinstance(item, torch.Tensor):
            return item
        host = self._view_on_host(copies, item)
        if host is None:
            host = item.detach().cpu() if item.device.type != "cpu" else item.detach().clone()
            self._alias(host, item)
        return host.requires_grad_(item.requires_grad)

    def _view_on_host(self, copies: Mapping[int, torch.Tensor], item: torch.Tensor) -> torch.Tensor | None:
        for key, (host, _) in self._inputs.items():
            copy = copies[key]
            if item.layout != torch.strided or copy.layout != torch.strided or storage_key(item) != storage_key(copy):
                continue
            if item.shape == copy.shape and item.stride() == copy.stride():
                return host.detach()
            if host.stride() == copy.stride():
                offset = host.storage_offset() + item.storage_offset() - copy.storage_offset()
                return host.detach().as_strided(item.shape, item.stride(), offset)
        return None
