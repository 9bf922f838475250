"""Updates of chunks whose masters are on the host, beside the device.

Note [Updates on the host]
A gradient comes to the host, 2 bytes for each parameter, and the parameter goes back; the 12 bytes of masters and
Adam's state stay where they are. One thread updates one chunk after the other, with all cores, while copies of the
chunks before and behind it run on streams of their own, and the device goes on with backward. Two buffers take turns;
a second thread has gradients copied as soon as one is free. Until then they stay where they are, and nobody waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeAlias

import torch

from torch_lms.chunk.masters import Masters
from torch_lms.chunk.model_data import ModelData, same_bytes
from torch_lms.chunk.updates import Updates

__all__ = ["HostUpdates"]

Pairs: TypeAlias = Sequence[tuple[torch.Tensor, torch.Tensor]]

_BUFFERS = 2


@dataclass
class _Update:
    """One that has been started: it keeps the gradients until they have been copied.

    An interrupt may come before the sender has it, or before that is noted.
    """

    numbers: Sequence[int]
    gradients: Sequence[torch.Tensor]
    sent: Future[None] | None = None
    done: Future[torch.cuda.Event | None] | None = None  # the sender says so


@dataclass
class _Buffer:
    """Room for a chunk's gradients on their way out, and then for its parameters on their way back."""

    chunk: torch.Tensor
    free: torch.cuda.Event | None = None  # when the device has read what was in it last


class HostUpdates(Updates):
    """Updates masters on the host, and brings the parameters that are made from them to the device.

    Not thread-safe: one caller at a time, on whatever thread.

    Args:
        data: of the model.
        masters: to update.
        ended: called by `wait` with the tensors of an update whose parameters have come.
        failed: called by `wait` with a tensor, and its gradient, of an update that has failed.
    """

    def __init__(
        self,
        data: ModelData,
        masters: Masters,
        *,
        ended: Callable[[Sequence[int]], None],
        failed: Callable[[int, torch.Tensor], None],
    ) -> None:
        super().__init__(data)
        self._masters = masters
        self._ended = ended
        self._failed = failed
        self._running: deque[_Update] = deque()
        on_cuda = data.device.type == "cuda"
        self._out = torch.cuda.Stream(data.device) if on_cuda else None
        self._in = torch.cuda.Stream(data.device) if on_cuda else None
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="torch_lms gradients")
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="torch_lms chunks")
        self._buffers: SimpleQueue[_Buffer] = SimpleQueue()
        for _ in range(_BUFFERS):
            chunk = torch.empty(data.part_numel, dtype=data.dtype, device="cpu", pin_memory=on_cuda)
            self._buffers.put(_Buffer(chunk))
        self._gradients = torch.empty(data.part_numel, device="cpu")  # of the chunk that is being updated

    @torch.no_grad()
    def start(self, numbers: Sequence[int], gradients: Sequence[torch.Tensor], scale: float | None = None) -> None:
        """Updates tensors of one chunk, once those before it are updated."""
        made = None if self._out is None else torch.cuda.current_stream(self._data.device).record_event()
        update = _Update(numbers, gradients)
        self._running.append(update)
        update.sent = self._sender.submit(self._send, update, made, scale)

    def wait(self) -> None:
        """Until all updates that have been started are over; the device waits for the parameters, not the caller.

        Raises:
            Exception: what the optimizer has raised first, when all are over. Tensors of that update have their
                gradients again.
        """
        failed: Exception | None = None
        while self._running:
            # An interrupt of the wait alone: updates go on, and are waited for another time.
            error = self._wait_for(self._running[0])
            self._running.popleft()
            failed = failed or error
        if failed is not None:
            raise failed

    def _wait_for(self, update: _Update) -> Exception | None:
        """Returns what it has failed with."""
        try:
            (update.sent or self._sender.submit(_nothing)).result()  # what the sender had before has been sent, too
            went = None if update.done is None else update.done.result()
        except Exception as error:
            self._fail(update)
            return error
        if update.done is None:
            self._fail(update)
            return None
        if went is not None:
            torch.cuda.current_stream(self._data.device).wait_event(went)
        self._ended(update.numbers)
        return None

    def _fail(self, update: _Update) -> None:
        for number, gradient in zip(update.numbers, update.gradients, strict=True):
            self._failed(number, gradient)

    @torch.no_grad()
    def _send(self, update: _Update, made: torch.cuda.Event | None, scale: float | None) -> None:
        """By the sender. Waits until an earlier update is over."""
        buffer = self._buffers.get()
        try:
            if self._out is not None and made is not None:
                self._out.wait_event(made)
                if buffer.free is not None:
                    self._out.wait_event(buffer.free)
            with self._timed("gradients out", self._out):
                came = _copy(self._gradients_out(update.numbers, update.gradients, buffer.chunk), self._out)
            update.done = self._worker.submit(self._update, update.numbers, buffer, came, scale)
        except BaseException:
            self._buffers.put(buffer)
            raise

    @torch.no_grad()
    def _update(
        self, numbers: Sequence[int], buffer: _Buffer, came: torch.cuda.Event | None, scale: float | None
    ) -> torch.cuda.Event | None:
        """By the worker. Nobody else uses the parameters' bytes: what the device still had to read has been read."""
        try:
            if came is not None:
                came.synchronize()
            with self._timed("update"):
                self._update_in(numbers, buffer, scale)
            with self._timed("parameters in", self._in):
                buffer.free = _copy(self._parameters_in(numbers, buffer.chunk), self._in)
            return buffer.free
        finally:
            self._buffers.put(buffer)

    def _update_in(self, numbers: Sequence[int], buffer: _Buffer, scale: float | None) -> None:
        """From the gradients in a buffer to the parameters there."""
        gradients = [self._part(self._gradients, one).copy_(self._part(buffer.chunk, one)) for one in numbers]
        if scale is not None:
            torch._foreach_div_(gradients, scale)
        self._masters.step(numbers, gradients)
        for number in numbers:
            self._part(buffer.chunk, number).copy_(self._data.tensor_to_update(number))

    def _gradients_out(self, numbers: Sequence[int], gradients: Sequence[torch.Tensor], buffer: torch.Tensor) -> Pairs:
        """As one copy, where all gradients lie in the chunk."""
        if all(map(same_bytes, gradients, map(self._data.parameter_part, numbers))):
            return [(buffer, self._chunk_of(numbers))]
        return [(self._part(buffer, number), one) for number, one in zip(numbers, gradients, strict=True)]

    def _parameters_in(self, numbers: Sequence[int], buffer: torch.Tensor) -> Pairs:
        """As one copy, where there are no others in the chunk."""
        chunk = self._data.chunk_of(numbers[0])
        if len(numbers) == sum(self._data.masters[one] is not None for one in self._data.in_chunk[chunk]):
            return [(self._chunk_of(numbers), buffer)]
        return [(self._data.parameter_part(number), self._part(buffer, number)) for number in numbers]

    def _chunk_of(self, numbers: Sequence[int]) -> torch.Tensor:
        return self._data.parameters.chunk(self._data.chunk_of(numbers[0]))

    def _part(self, chunk: torch.Tensor, number: int) -> torch.Tensor:
        return self._data.part_of(chunk, number)


def _nothing() -> None:
    pass


def _copy(pairs: Pairs, stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    """Each to its first tensor; without a stream they are over, else the returned event tells."""
    with torch.cuda.stream(stream):  # none: as it is
        for to, source in pairs:
            to.copy_(source, non_blocking=True)
    return None if stream is None else stream.record_event()
