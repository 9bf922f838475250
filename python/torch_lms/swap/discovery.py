"""The tensors of the program, looked for where nobody has watched it make them.

While automatic mode sleeps, ops tell nothing (Note [Learn, sleep, arm] in csrc/extension/policy/Wakefulness.h). When
memory grows short after all, `make_known` is called once, on the main thread, between two of Python's instructions:
what the program holds is found by Python's garbage collector, and what graphs keep for backward by following them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from torch_lms._core import core

__all__ = ["make_known"]


def make_known() -> None:
    """Tells the core of every tensor that can be found. Takes about a tenth of a second for a million objects.

    It comes between any two instructions of the program: what this asks of tensors must call no functions of their
    subclasses, and none of the modes that are on.
    """
    with torch._C.DisableTorchFunction():
        held = core.tensors_of_program()
        held += [gradient for tensor in held if tensor.is_leaf and (gradient := tensor.grad) is not None]
        core.discover([tensor for tensor in held if core.movable(tensor)])
        core.discover([tensor for tensor in _saved_in(held) if core.movable(tensor)])


def _saved_in(roots: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """What the graphs of some tensors keep for backward; hooks that pack it are not run."""
    nodes: list[Any] = [tensor.grad_fn for tensor in roots if tensor.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        for name in dir(node):
            if name.startswith("_raw_saved_"):
                yield from _tensors_of(_saved_as(node, name))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)


def _saved_as(node: Any, name: str) -> Any:
    try:
        return getattr(node, name)
    except RuntimeError:  # its backward has run, and it has let go of them
        return []


def _tensors_of(saved: Any) -> Iterator[torch.Tensor]:
    for each in saved if isinstance(saved, list | tuple) else [saved]:
        data = getattr(each, "data", None)
        if isinstance(data, torch.Tensor):
            yield data
