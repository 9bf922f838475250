"""The states of random numbers besides PyTorch's own: Python's, NumPy's, and those of generators that a model has."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torch_lms._torch_compat import tree_flatten
from torch_lms.errors import ProfileError

__all__ = ["PythonDraws", "generators_kept", "generators_of"]


@contextmanager
def generators_kept(generators: Iterable[torch.Generator] = ()) -> Iterator[None]:
    """Puts back the states of Python's and NumPy's random numbers, and those of generators."""
    before = [(generator, generator.get_state()) for generator in generators]
    python, numpy = random.getstate(), sys.modules.get("numpy")
    of_numpy = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)
        for generator, state in before:
            generator.set_state(state)


def generators_of(model: nn.Module, values: Any = ()) -> list[torch.Generator]:
    """The generators that are attributes of a model's modules, or among some values."""
    found = [*tree_flatten(values)[0], *(value for module in model.modules() for value in vars(module).values())]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


class PythonDraws:
    """Whether Python's or NumPy's random numbers have been drawn since this was made."""

    def __init__(self) -> None:
        self._before = _state()

    def refuse(self) -> None:
        """Says that a graph would have such numbers as constants.

        Raises:
            ProfileError: if there were any.
        """
        if _state() != self._before:
            raise ProfileError(
                "expected random numbers of PyTorch alone, found a forward that draws Python's or NumPy's, which would "
                "be the same in each run of a graph; draw them with torch.rand"
            )


def _state() -> tuple[Any, bytes]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), pickle.dumps(numpy.random.get_state()) if numpy is not None else b""
