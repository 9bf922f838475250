"""Units of a model whose parameters are gathered together, where ranks keep parts of chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from torch_lms.chunk.hooks import NEVER_CALLED, ModuleHooks, own_parameters
from torch_lms.chunk.model_data import ModelData
from torch_lms.chunk.sharding import ShardedOccupancy

__all__ = ["UnitHooks", "order_of_use", "units_of"]

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def units_of(module: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """The units of a model, with their parameters.

    A unit is a block of the model, that is, an element of its outermost lists, with all that is in it: which of a
    block's modules run may depend on the data (experts), and all ranks must gather the same. Outside of lists it is a
    module that owns parameters itself: with all that is in it, unless there are lists in it.
    """
    own = [] if isinstance(module, NEVER_CALLED) else list(own_parameters(module))
    if own and not any(isinstance(one, _LISTS) for one in module.modules()):
        yield module, list(module.parameters())  # it may use its children's without calling them
        return
    if own:
        yield module, own
    for child in module.children():
        if isinstance(module, _LISTS) and not isinstance(child, (*_LISTS, *NEVER_CALLED)):
            yield child, list(child.parameters())
        else:
            yield from units_of(child)


@torch.no_grad()
def order_of_use(model: nn.Module, *arguments: Any, **named: Any) -> list[nn.Parameter]:
    """A model's parameters in the order in which one call of it uses their units, for `torch_lms.chunked`.

    The call is one as any other: random numbers go on, and so do statistics that the model keeps. A model on the meta
    device can be called with tensors there, unless it looks at values.

    Args:
        model: not in chunks yet.
        arguments: that it is called with.
        named: likewise.

    Returns:
        The parameters of the units that have been called.
    """
    found: dict[nn.Parameter, None] = {}
    handles = [
        unit.register_forward_pre_hook(lambda _, __, own=parameters: found.update(dict.fromkeys(own)))
        for unit, parameters in units_of(model)
    ]
    try:
        model(*arguments, **named)
    finally:
        for handle in handles:
            handle.remove()
    return list(found)


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
        self._sharded().check_in_place(self._own.get(module, ()))
        changed = super()._begin(module, arguments, named)
        if numbers := self._own.get(module):
            self._await_backward(numbers, _with_gradients((arguments, named) if changed is None else changed))
        return changed

    def _await_backward(self, numbers: tuple[int, ...], inputs: list[torch.Tensor]) -> None:
        """Sees to it that the end of the backward of a unit's call is told, if it needs one."""
        in_checkpoint = torch._C._current_graph_task_id() != -1
        unique = {id(one): one for one in inputs}.values()
        made = [one for one in unique if not one.is_leaf]
        if in_checkpoint and any(map(_is_awaited_by_a_call, made)):
            return  # the call had a graph itself, which will tell
        if not self._sharded().awaits_backward(numbers):
            return
        if made or in_checkpoint:  # leaves keep hooks, but for those that checkpoints make
            tell = partial(self._sharded().backward_ended, numbers)
            came = _Came(1 if made else len(unique), tell, of_a_call=not in_checkpoint)
            for one in made or unique:
                one.register_hook(came)

    def _end(self, module: nn.Module, arguments: Any, named: Any, outputs: Any) -> None:
        running = self._running()
        has_run = bool(running) and running[-1][0] is module
        super()._end(module, arguments, named, outputs)
        if numbers := self._own.get(module):
            inputs = {id(one) for one in _with_gradients((arguments, named))}
            for output in _with_gradients(outputs):
                if id(output) not in inputs:  # whose backward is another unit's
                    output.register_hook(lambda _: self._sharded().backward_begins(numbers))
            if has_run:
                self._sharded().check_unwritten(numbers)

    def _sharded(self) -> ShardedOccupancy:
        assert isinstance(self._occupancy, ShardedOccupancy)
        return self._occupancy


class _Came:
    """Tells when so many gradients have come in one backward. It holds no graph: that would hold it, for ever.

    Args:
        count: of gradients.
        tell: called then.
        of_a_call: whether it has been made in one, not in a backward.
    """

    def __init__(self, count: int, tell: Callable[[], None], *, of_a_call: bool) -> None:
        self.of_a_call = of_a_call
        self._count = count
        self._tell = tell
        self._task = -1
        self._left = count

    def __call__(self, _: torch.Tensor) -> None:
        """One has come."""
        if (task := torch._C._current_graph_task_id()) != self._task:
            self._task, self._left = task, self._count
        self._left -= 1
        if self._left == 0:
            self._tell()


def _is_awaited_by_a_call(one: torch.Tensor) -> bool:
    hooks = (one._backward_hooks or {}).values()
    return any(isinstance(hook, _Came) and hook.of_a_call for hook in hooks)


def _with_gradients(values: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, torch.Tensor) and one.requires_grad]
