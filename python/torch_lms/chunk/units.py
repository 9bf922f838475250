"""Units of a model whose parameters are gathered together, where ranks keep parts of chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from torch_lms.chunk.hooks import ModuleHooks
from torch_lms.chunk.model_data import ModelData
from torch_lms.chunk.sharding import ShardedOccupancy

__all__ = ["UnitHooks", "units_of"]

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def units_of(module: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """The units of a model, with their parameters.

    A unit is a block of the model, that is, an element of its outermost lists, with all that is in it: which of a
    block's modules run may depend on the data (experts), and all ranks must gather the same. Outside of lists it is a
    module that owns parameters itself.
    """
    own = list(module.parameters(recurse=False))
    if own:
        yield module, own
    for child in module.children():
        if isinstance(module, _LISTS) and not isinstance(child, _LISTS):
            yield child, list(child.parameters())
        else:
            yield from units_of(child)


class UnitHooks(ModuleHooks):
    """Gathers the parameters of units around their forwards and backwards.

    Thread-safe: each thread's calls are its own.
    """

    def _own_numbers(self, model: nn.Module, data: ModelData) -> dict[nn.Module, tuple[int, ...]]:
        found: dict[nn.Module, dict[int, None]] = {}
        for module, parameters in units_of(model):
            numbers = found.setdefault(module, {})
            numbers.update(dict.fromkeys(data.numbers[one] for one in parameters if one in data.numbers))
        return {module: tuple(numbers) for module, numbers in found.items()}

    def _begin(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        changed = super()._begin(module, arguments, named)
        numbers = self._own.get(module)
        if numbers and self._sharded().awaits_backward(numbers):
            inputs = _with_gradients((arguments, named) if changed is None else changed)
            if inputs:
                torch.autograd.graph.register_multi_grad_hook(inputs, lambda _: self._sharded().backward_ended(numbers))
        return changed

    def _end(self, module: nn.Module, arguments: Any, outputs: Any) -> None:
        super()._end(module, arguments, outputs)
        if numbers := self._own.get(module):
            for output in _with_gradients(outputs):
                output.register_hook(lambda _: self._sharded().backward_begins(numbers))

    def _sharded(self) -> ShardedOccupancy:
        assert isinstance(self._occupancy, ShardedOccupancy)
        return self._occupancy


def _with_gradients(values: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, torch.Tensor) and one.requires_grad]
