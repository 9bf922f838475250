"""What `parameter.grad` is where gradients are spread over ranks: it says only that there is one."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_lms._core import core
from torch_lms.chunk.model_data import ModelData
from torch_lms.chunk.reduction import Reductions
from torch_lms.chunk.whole_gradients import WholeGradients
from torch_lms.errors import ChunkError

__all__ = ["ShownGradients"]

_NO_GRADIENT = (
    "expected gradients to be used by the optimizer alone, since they are spread over ranks, found that of {name} "
    "being read or written; to clip them call optimizer.clip_grad_norm_(max_norm)"
)


class ShownGradients:
    """Shows the program which tensors have gradients, and notices which of them it has dropped.

    Not thread-safe: the lock of its owner guards it.

    Args:
        data: of the model.
        reductions: of what is spread.
        whole: gradients of what every rank has.
    """

    def __init__(self, data: ModelData, reductions: Reductions, whole: WholeGradients) -> None:
        self._data = data
        self._reductions = reductions
        self._whole = whole
        self._had: set[int] = set()  # gradients of backwards before the one that runs
        self._shown: dict[int, torch.Tensor] = {}  # by number

    def show(self, number: int) -> None:
        """The program sees that there is one."""
        one = self._data.tensors[number]
        if number in self._whole:
            self._whole.show(number)
            return
        gradient = self._data.views[number].detach()
        core.take_bytes(gradient, _NO_GRADIENT.format(name=one.name))
        one.parameter.grad = self._shown[number] = gradient

    def check(self) -> None:
        """Refuses what the program has put there instead.

        Raises:
            ChunkError: if it has.
        """
        for number, one in enumerate(self._data.tensors):
            gradient = one.parameter.grad
            is_ours = self._data.is_cut[self._data.chunk_of(number)] and one.group is not None
            if is_ours and gradient is not None and gradient is not self._shown.get(number):
                raise ChunkError(
                    "expected gradients that backward has made, since they are spread over ranks, found another one "
                    f"of {one.name}; call backward, and leave parameter.grad alone"
                )

    def hide(self) -> None:
        """A backward begins: autograd must not add to what has no bytes, nor to a mean what is none yet."""
        come = self._reductions.have_come()
        if come and not self.are_wanted(come):
            self._reductions.forget()
            return
        self._whole.hide()
        for number in self._cut(come):
            parameter = self._data.tensors[number].parameter
            if parameter.grad is None:
                self._reductions.drop(number)
            else:
                self._had.add(number)
                parameter.grad = None

    def show_all(self) -> None:
        """It has ended, or failed."""
        for number in self._had | self._cut(self._reductions.have_come()):
            self.show(number)
        self._had.clear()
        self._whole.restore()  # of a backward that has failed

    def are_wanted(self, numbers: Iterable[int]) -> bool:
        """Whether the program has not dropped gradients: those that came elsewhere, if all others."""
        come = self._reductions.have_come()
        here = come.intersection(numbers)
        return any(
            number in self._had or self._data.tensors[number].parameter.grad is not None for number in here or come
        )

    def forget(self) -> None:
        """The program has dropped all of them."""
        self._whole.forget()
        self._shown.clear()

    def _cut(self, numbers: Iterable[int]) -> set[int]:
        return {number for number in numbers if number not in self._whole}
