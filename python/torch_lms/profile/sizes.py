"""Sizes from one pass: outputs, and what each node keeps for backward.

What autograd wants to keep is noted and thrown away, so that the pass needs no more memory than inference does. Only of
a forward that itself runs a backward, as `torch.func.grad` does, it is kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from torch_lms.profile.storages import StorageNames, tensor_bytes, tensors_in
from torch_lms.profile.weight_meetings import kept_gradient_bytes

__all__ = ["NodeSizes", "SizeWatcher", "transforms_watched"]

_WATCHING = threading.RLock()  # two threads would put back what the other one has set


@dataclass(frozen=True)
class NodeSizes:
    """What a node gives and keeps; fields as of `torch_lms.profile.document.NodeProfile`."""

    output_bytes: int = 0
    gradient_bytes: int = 0
    kept_gradient_bytes: int = 0
    saved: tuple[str, ...] = ()
    output_storages: tuple[str, ...] = ()
    saved_parameters: tuple[str, ...] = ()


class SizeWatcher:
    """Notes the sizes of each node that runs under it.

    Args:
        storages: gives storages their names.
        of_weights: names of the nodes that read nothing but weights and buffers, such as a view of a weight.
        keeps: whether what is kept for backward is there for one, as a forward needs that runs a backward inside.

    Attributes:
        sizes: by the nodes' names.
        inside: names of nodes whose forward has run a backward, which fails where nothing is kept.
    """

    def __init__(self, storages: StorageNames, of_weights: Collection[str] = (), *, keeps: bool = False) -> None:
        self.sizes: dict[str, NodeSizes] = {}
        self.inside: set[str] = set()
        self._keeps = keeps
        self._storages, self._of_weights = storages, of_weights
        self._before: set[Any] = set()  # autograd's nodes of the values so far

    def watch(self, name: str, run: Callable[[], Any]) -> Any:
        """Runs a node and notes its sizes."""
        saved: dict[str, None] = {}
        own: dict[str, None] = {}
        # Nodes keep `pack`: through `self` it would keep them.
        storages, keeps, inside = self._storages, self._keeps, self.inside

        def pack(tensor: torch.Tensor) -> torch.Tensor | None:
            own.update(dict.fromkeys(storages.model_names(tensor)))
            saved.update(dict.fromkeys(storages.names(tensor, name)))
            return tensor if keeps else None

        def unpack(packed: torch.Tensor | None) -> torch.Tensor:
            inside.add(name)
            if packed is None:
                raise RuntimeError("expected a forward that runs no backward, found one while nothing is kept for it")
            return packed

        with saved_tensors_hooks(pack, unpack):
            value = run()
        tensors = list({id(tensor): tensor for tensor in tensors_in(value)}.values())
        self.sizes[name] = NodeSizes(
            output_bytes=sum(map(tensor_bytes, tensors)),
            gradient_bytes=sum(tensor_bytes(tensor) for tensor in tensors if tensor.requires_grad),
            kept_gradient_bytes=kept_gradient_bytes(tensors, self._before, self._is_parameter),
            saved=tuple(saved),
            output_storages=tuple(
                dict.fromkeys(found for tensor in tensors for found in self._storages.names(tensor, name))
            ),
            saved_parameters=tuple(own),
        )
        if name not in self._of_weights:
            self._before.update(tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None)
        return value

    def forget_values(self) -> None:
        """What comes takes none of the values so far; autograd's nodes hold the leaves that they were made of."""
        self._before.clear()

    def _is_parameter(self, leaf: torch.Tensor) -> bool:
        return bool(self._storages.model_names(leaf))


@contextmanager
def transforms_watched() -> Iterator[None]:
    """Lets what `torch.func` calls run under a `SizeWatcher`.

    Its transforms refuse hooks on what is kept for backward, since these may give back something else. Those of a
    watcher do not. Hooks are of one thread, so in others nothing is refused that was right.
    """
    graph = torch.autograd.graph
    if not hasattr(graph, "disable_saved_tensors_hooks"):  # PyTorch 1.12
        yield
        return
    with _WATCHING:
        disable = graph.disable_saved_tensors_hooks
        graph.disable_saved_tensors_hooks = nullcontext  # type: ignore[assignment]
        try:
            yield
        finally:
            graph.disable_saved_tensors_hooks = disable
