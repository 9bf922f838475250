"""What a program would do by hand in place of paging: weights in pinned memory, copied one layer ahead of their use."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

__all__ = ["StreamedWeights"]


class StreamedWeights:
    """The first layers' weights stay on the device; those of the others take turns in two sets of buffers there.

    Args:
        layers: an even number, all of one shape, called one after the other.
        resident: how many of them stay at most; one less where the others would be odd in number.

    Attributes:
        nbytes: that come in on every pass.
    """

    def __init__(self, layers: Sequence[nn.Module], *, resident: int) -> None:
        resident -= resident % 2  # the first layer's next weights must not arrive where the last layer's are in use
        self.streamed = [list(layer.parameters()) for layer in layers[resident:]]
        device = next(layers[0].parameters()).device
        cuda = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if cuda else None
        shapes = [parameter.data for parameter in self.streamed[0]] if self.streamed else []
        self.buffers = [[torch.empty_like(data) for data in shapes] for _ in range(2)]
        self.nbytes = sum(parameter.nbytes for parameters in self.streamed for parameter in parameters)
        self.hosts: list[list[torch.Tensor]] = []
        self.ready: list[Any] = [torch.cuda.Event() if cuda else None for _ in range(2)]
        for index, parameters in enumerate(self.streamed):
            self.hosts.append([_on_host(parameter.data, pinned=cuda) for parameter in parameters])
            for parameter, buffer in zip(parameters, self.buffers[index % 2], strict=True):
                parameter.data = buffer
            layers[resident + index].register_forward_pre_hook(lambda *_, index=index: self._before(index))
        if self.streamed:
            self._copy(0)

    def _before(self, index: int) -> None:
        """A layer is about to run: its weights are waited for, and those of the next begin to come."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_event(self.ready[index % 2])
        self._copy((index + 1) % len(self.streamed))

    def _copy(self, index: int) -> None:
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())  # what has used the buffers before
        with self._on_stream():
            for buffer, host in zip(self.buffers[index % 2], self.hosts[index], strict=True):
                buffer.copy_(host, non_blocking=True)
            if self.stream is not None:
                self.ready[index % 2].record(self.stream)

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


def _on_host(data: torch.Tensor, *, pinned: bool) -> torch.Tensor:
    """A copy on the host."""
    copy = torch.empty(data.shape, dtype=data.dtype, pin_memory=pinned)
    return copy.copy_(data)
