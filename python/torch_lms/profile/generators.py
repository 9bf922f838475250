"""The states of random numbers besides PyTorch's own: Python's, NumPy's, and those of generators that a model has."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from torch_lms._torch_compat import tree_flatten
from torch_lms.errors import ProfileError
from torch_lms.profile.sameness import is_same

__all__ = ["PythonDraws", "generators_kept", "generators_of"]


class PythonDraws:
    """The states of Python's and NumPy's random numbers when this was made."""

    def __init__(self) -> None:
        self._before = random.getstate(), np.random.get_state()

    def any(self) -> bool:
        """Whether such numbers have been drawn since."""
        return not is_same(self._before, (random.getstate(), np.random.get_state()))

    def refuse(self) -> None:
        """Says that a graph would have such numbers as constants.

        Raises:
            ProfileError: if there were any.
        """
        if self.any():
            raise ProfileError(
                "expected random numbers of PyTorch alone, found a forward that draws Python's or NumPy's, which would "
                "be the same in each run of a graph; draw them with torch.rand"
            )

    def put_back(self) -> None:
        """Has the same numbers drawn again."""
        python, numpy = self._before
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def generators_kept(generators: Iterable[torch.Generator] = ()) -> Iterator[PythonDraws]:
    """Puts back the states of Python's and NumPy's random numbers, and those of generators."""
    before = [(generator, generator.get_state()) for generator in generators]
    draws = PythonDraws()
    try:
        yield draws
    finally:
        draws.put_back()
        for generator, state in before:
            generator.set_state(state)


def generators_of(model: nn.Module, values: Any = ()) -> list[torch.Generator]:
    """The generators that are attributes of a model's modules, or among some values."""
    found = [*tree_flatten(values)[0], *(value for module in model.modules() for value in vars(module).values())]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())
