"""What updates chunks whose masters are on the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from torch_lms.chunk.model_data import ModelData
from torch_lms.chunk.timeline import Timeline

__all__ = ["Updates"]


class Updates(ABC):
    """Updates beside the program: each is started, and waited for before anybody uses the parameters.

    Args:
        data: of the model.
    """

    def __init__(self, data: ModelData) -> None:
        self._data = data
        self.timeline: Timeline | None = None  # what is done is recorded there

    def _timed(
        self, lane: str, stream: torch.cuda.Stream | None = None, *, beside: bool = True
    ) -> AbstractContextManager[object]:
        """As `Timeline.span`, where one records."""
        return nullcontext() if self.timeline is None else self.timeline.span(lane, stream, beside=beside)

    def groups(self, chunk: int) -> list[list[int]]:
        """The tensors of a chunk that are best updated together."""
        return [self._data.in_chunk[chunk]]

    @abstractmethod
    def start(self, numbers: Sequence[int], gradients: Sequence[torch.Tensor], scale: float | None = None) -> None:
        """Updates tensors of one chunk. Does not wait.

        Args:
            numbers: of the tensors.
            gradients: of these; nobody writes to them until `wait`.
            scale: of the loss, if gradients have it still.
        """

    @abstractmethod
    def wait(self) -> None:
        """Until all parameters of updates that have been started are made: the device waits for them, not the caller.

        Raises:
            Exception: what the optimizer has raised first. Tensors of that update have their gradients again.
        """

    def abandon(self) -> None:  # noqa: B027  # most have nothing to forget
        """What has been updated in part is to be updated anew."""

    def step_ended(self) -> None:  # noqa: B027
        """The next update is the first of a step."""
