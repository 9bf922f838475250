"""Modes such as ``torch.no_grad`` and autocast: a graph of plain calls has none, so who makes one refuses them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torch_lms._torch_compat import ambient_modes, function_mode
from torch_lms.profile.calls import BACKWARDS

__all__ = ["Modes", "ModesError", "functions_refused"]

_WATCHING = threading.RLock()  # two threads would put back what the other one has set


class ModesError(Exception):
    """A part of the model runs in a mode of its own."""

    def __init__(self) -> None:
        super().__init__(
            "expected code that runs as all of the model does, found some under torch.no_grad, autocast or another "
            "mode of its own, in a torch.autograd.Function, in a backward without create_graph, or with a hook on a "
            "value's gradient"
        )


class Modes:
    """The modes that the whole model runs in: those of now."""

    def __init__(self) -> None:
        self._whole = ambient_modes()

    def check(self) -> None:
        """Refuses other modes.

        Raises:
            ModesError: if there are.
        """
        if ambient_modes() != self._whole:
            raise ModesError

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Refuses autocast where it begins, in this thread: one that is off differs only where another one is on."""
        with _WATCHING:
            enter, own = torch.autocast.__enter__, threading.get_ident()

            def refuse(context: Any) -> Any:
                if threading.get_ident() == own:
                    raise ModesError
                return enter(context)  # type: ignore[no-untyped-call]

            torch.autocast.__enter__ = refuse  # type: ignore[method-assign]
            try:
                yield
            finally:
                torch.autocast.__enter__ = enter  # type: ignore[method-assign]


@contextmanager
def functions_refused() -> Iterator[None]:
    """Refuses what changes gradients: a `torch.autograd.Function`, a hook on a value, and an inference mode of its own.

    A graph has the forward alone, and would have autograd's backward for it. The function is known by its forward
    running without gradient while nobody has turned that off. `torch.export` keeps other modes, but not that of
    inference.

    Raises:
        ModesError: if there is one.
    """
    expected, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal expected
        if torch.is_grad_enabled() != expected or torch.is_inference_mode_enabled() != inference:
            raise ModesError
        if function is torch.Tensor.register_hook:
            raise ModesError
        if function in BACKWARDS and not kwargs.get("create_graph"):  # a graph would have a gradient for its result
            raise ModesError
        result = function(*args, **kwargs)
        if function is torch._C._set_grad_enabled:
            expected = torch.is_grad_enabled()
        return result

    with function_mode(call):
        yield
