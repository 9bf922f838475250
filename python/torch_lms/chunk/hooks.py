"""Modules tell when they use their parameters."""

from __future__ import annotations

import itertools
import operator
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_is_leaf, tree_unflatten

from torch_lms.chunk.model_data import ModelData
from torch_lms.chunk.occupancy import Occupancy
from torch_lms.errors import ChunkError

__all__ = ["NEVER_CALLED", "ModuleHooks", "own_parameters"]

NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""What only holds others: the module around it uses its parameters."""


def own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Those that a call of the module uses itself: also those in what is never called."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if isinstance(child, NEVER_CALLED):
            yield from own_parameters(child)


class ModuleHooks:
    """Accesses and releases parameters around the modules that own them.

    A call of the model is that of any of its modules which no other of them has called. Copies of a model have a plain
    model's bytes and no chunks: the copied hooks do nothing.

    Thread-safe: each thread's calls are its own.
    """

    def __init__(self) -> None:
        self._threads: dict[int, list[tuple[nn.Module, int | None]]] = {}  # what runs on each
        self._own: dict[nn.Module, tuple[int, ...]] = {}
        self._all: dict[nn.Module, tuple[int, ...]] = {}

    def __reduce__(self) -> tuple[type[ModuleHooks], tuple[()]]:
        """For copies."""
        return ModuleHooks, ()

    def attach(self, model: nn.Module, data: ModelData, occupancy: Occupancy, dtype: torch.dtype) -> None:
        """Begins to tell.

        Args:
            model: whose parameters are in chunks.
            data: of the model.
            occupancy: to tell.
            dtype: that 32-bit tensors which the model is called with, also in containers, are cast to, unless autocast
                will see to that.
        """
        self._occupancy = occupancy
        self._data = data
        self._dtype = dtype
        self._calls = itertools.count()
        self._own = self._own_numbers(model, data)
        for module in model.modules():
            self._all[module] = tuple(data.numbers[one] for one in module.parameters() if one in data.numbers)
            if not self._all[module]:
                continue
            module.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._end, with_kwargs=True, always_call=True)

    def abandon_calls(self) -> None:
        """The calling thread's calls have ended, whatever they have told: an interrupt leaves without a word."""
        running = self._running()
        if any(other and other is not running for other in list(self._threads.values())):
            while running:
                self._end(running[-1][0], None, None, None)
        else:
            running.clear()
            self._occupancy.nobody_runs()

    def _own_numbers(self, model: nn.Module, data: ModelData) -> dict[nn.Module, tuple[int, ...]]:
        """What each module accesses: that of it which is in chunks."""
        own = {module: dict.fromkeys(own_parameters(module)) for module in model.modules()}
        return {
            module: tuple(data.numbers[one] for one in parameters if one in data.numbers)
            for module, parameters in own.items()
        }

    def _running(self) -> list[tuple[nn.Module, int | None]]:
        """The modules that run on the calling thread, and the calls of the model that they belong to."""
        return self._threads.setdefault(threading.get_ident(), [])

    def _begin(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if module not in self._all:
            return None
        running = self._running()
        if running and running[0][0] is module:  # the model in itself: an interrupt has ended the call before this one
            self.abandon_calls()
        in_backward = torch._C._current_graph_task_id() != -1
        call = running[-1][1] if running else None if in_backward else next(self._calls)
        outermost = not running
        if outermost:
            self._check_filled(self._all[module])
            self._check_types(self._all[module])
            self._occupancy.call_begins(self._all[module], call)
        running.append((module, call))  # before, so that no other thread takes what it accesses for abandoned
        try:
            self._occupancy.access(self._own.get(module, ()))
        except BaseException:
            running.pop()
            raise
        return self._cast_inputs(arguments, named) if outermost and call is not None else None

    def _check_filled(self, numbers: tuple[int, ...]) -> None:
        if missing := self._data.unfilled.intersection(numbers):
            names = ", ".join(self._data.tensors[number].name for number in sorted(missing)[:3])
            raise ChunkError(
                f"expected parameters with values, found {len(missing)} without, {names} among them; fill them by "
                "load_state_dict"
            )

    def _check_types(self, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            one, view = self._data.tensors[number], self._data.views[number]
            if one.parameter.dtype is not view.dtype:
                raise ChunkError(
                    f"expected {one.name} to be {view.dtype}, as torch_lms.chunked has made it, found "
                    f"{one.parameter.dtype}; call model.to({view.dtype}), and leave model.float() and such out: the "
                    "optimizer updates masters of 32 bits"
                )

    def _cast_inputs(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """What the model is to be called with instead; None if nothing changes."""
        given = (*arguments, *named.values())
        cast = tuple(map(self._cast, given))
        if all(map(operator.is_, cast, given)):
            return None
        return cast[: len(arguments)], dict(zip(named, cast[len(arguments) :], strict=True))

    def _cast(self, value: Any) -> Any:
        """A value with all its tensors in the model's type; itself where they are, since the model may write to it."""
        if isinstance(value, torch.Tensor):
            is_cast = value.dtype == torch.float32 and not torch.is_autocast_enabled(value.device.type)
            return value.to(self._dtype) if is_cast else value
        if tree_is_leaf(value):
            return value
        given, kind = tree_flatten(value, is_leaf=lambda one: one is not value)  # one level
        cast = [self._cast(one) for one in given]
        return value if all(map(operator.is_, cast, given)) else tree_unflatten(cast, kind)

    def _end(self, module: nn.Module, _: Any, __: Any, ___: Any) -> None:
        if module not in self._all:
            return
        running = self._running()
        if not running or running[-1][0] is not module:
            return  # it failed before it began
        _, call = running.pop()
        self._occupancy.release(self._own.get(module, ()))
        if not running and call is not None:
            self._occupancy.call_ended(self._all[module])
