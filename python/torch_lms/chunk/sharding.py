"""What parameters' bytes are where ranks keep parts of chunks.

Note [Parameters spread over ranks]
Between calls of the model each rank has its part of every chunk, and nobody has the whole. Before a unit of the model
runs, or its backward does, its chunks are gathered, and those of the unit that ran next the last time begin to come.
A chunk is given up when all its tensors have been used (HOLD_AFTER_FWD), at the end of the call, and in backward when
its units' backwards have ended, as many of them as there were calls, and another unit's begins. Then it gets no more
gradients either, and is complete. Autograd runs what was made last first: so a unit's backward has ended when that of
any tensor goes on which it was called with, though others may still wait for the gradients of more units, as an
encoder's output does. Gradients are collected in a chunk of their own; their means take the place of the parameters in
this rank's part. `parameter.grad` only says that there is a gradient: it has no bytes.

All ranks must call the same units in the same order.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Literal

import torch

from torch_lms.chunk.awaited_backwards import AwaitedBackwards
from torch_lms.chunk.model_data import ModelData, same_bytes
from torch_lms.chunk.occupancy import Occupancy
from torch_lms.chunk.reduction import Reductions
from torch_lms.chunk.shown_gradients import ShownGradients
from torch_lms.chunk.states import TensorState
from torch_lms.chunk.whole_gradients import WholeGradients
from torch_lms.errors import ChunkError

__all__ = ["ShardedOccupancy"]

_WRITTEN = (
    "expected only the optimizer and load_state_dict to write to parameters that are spread over ranks, found {name} "
    "{how}; this is undone: write through model.load_state_dict between calls, and leave max_norm of embeddings out"
)

_Phase = Literal["forward", "backward"]
_Chunks = tuple[int, ...]
_Numbers = tuple[int, ...]


class ShardedOccupancy(Occupancy):
    """Keeps the states of parameters of which each rank has a part. See Note [Parameters spread over ranks].

    Thread-safe: autograd's threads bring gradients.

    Args:
        data: of the model.
        reuse: whether gradients take the place of parameters.
        gradient_ready: not called.
        settle: called without the lock with numbers of tensors; those whose updates are under way are as they will be
            then.
    """

    def __init__(
        self,
        data: ModelData,
        *,
        reuse: bool,
        gradient_ready: Callable[[int], None],
        settle: Callable[[Iterable[int]], None],
    ) -> None:
        super().__init__(data, reuse=reuse, gradient_ready=gradient_ready, settle=settle)
        self._reductions = Reductions(data, self._place_of)
        self._chunks_apart: set[int] = set()  # whose gradients have memory of their own
        self._next: dict[tuple[_Phase, _Chunks], _Chunks] = {}  # what was gathered after it the last time
        self._last: tuple[_Phase, _Chunks] | None = None
        self._running: weakref.ref[Callable[[], None]] | None = None  # what the outermost backward calls at its end
        self._awaited = AwaitedBackwards()
        self._opened: Counter[int] = Counter()  # by chunk: modules that are being loaded
        wide = {number: one for number, one in enumerate(data.tensors) if one.wide and one.group is not None}
        self._whole = WholeGradients({number: one.parameter for number, one in wide.items()}, data.ranks)
        self._shown = ShownGradients(data, self._reductions, self._whole)

    # --- modules ---

    def call_begins(self, numbers: Iterable[int], call: int | None) -> None:
        """A unit is about to run that no other of the model has called."""
        self._settle(numbers)
        with self._lock:
            self._awaited.call_begins(call is not None and torch.is_grad_enabled())
            if call is not None:
                self._last = None
                self._abandon_backward()

    def awaits_backward(self, numbers: _Numbers) -> bool:
        """A unit that uses these is called: whether `backward_ended` is to be told, if there is a graph now."""
        with self._lock:
            return self._awaited.note_call(numbers, self._cut_chunks(numbers), in_backward=_in_graph_task())

    def access(self, numbers: Iterable[int]) -> None:
        """A unit that uses these is about to run."""
        numbers = tuple(numbers)
        with self._lock:
            self._gather(self._cut_chunks(numbers), "backward" if _in_graph_task() else "forward")
            for number in numbers:
                if self.states[number] is not TensorState.COMPUTE:
                    self._versions[number] = self._data.tensors[number].parameter._version
                self.states.access(number)

    def check_in_place(self, numbers: Iterable[int]) -> None:
        """Before a unit runs: parameters for whose bytes the program has given others get theirs back.

        Raises:
            ChunkError: if so.
        """
        for number in numbers:
            one = self._data.tensors[number]
            cut = self._data.is_cut[self._data.chunk_of(number)]
            if cut and not same_bytes(one.parameter, self._data.views[number]):
                one.parameter.data = self._data.views[number]
                raise ChunkError(
                    _WRITTEN.format(name=one.name, how="with other bytes, as parameter.data = ... gives it")
                )

    def check_unwritten(self, numbers: Iterable[int]) -> None:
        """After it has run: what it has written to its parameters, nobody would keep.

        Raises:
            ChunkError: if it has.
        """
        for number in numbers:
            one = self._data.tensors[number]
            if self._data.is_cut[self._data.chunk_of(number)] and one.parameter._version != self._versions[number]:
                raise ChunkError(_WRITTEN.format(name=one.name, how="written to while its module ran"))

    def release(self, numbers: Iterable[int]) -> None:
        """It has run."""
        numbers = tuple(numbers)
        with self._lock:
            super().release(numbers)
            if not _in_graph_task():
                self._data.gathered.release(
                    chunk
                    for chunk in self._cut_chunks(numbers)
                    if all(self.states[one] is TensorState.HOLD_AFTER_FWD for one in self._data.in_chunk[chunk])
                )

    def call_ended(self, numbers: Iterable[int]) -> None:
        """What runs again from now on does so for a backward."""
        with self._lock:
            super().call_ended(numbers)
            if not self._is_in_backward():
                self._release_all()
                self._last = None

    def backward_begins(self, numbers: Sequence[int]) -> None:
        """The backward of a unit that uses these is about to run."""
        with self._lock:
            self._abandon_backward()
            if self._running is None:
                self._last = None
                self._awaited.begin(torch._C._autograd._get_current_graph_task_keep_graph())
                end = partial(self._end_backward)
                self._running = weakref.ref(end)  # a backward that fails forgets it
                torch.autograd.Variable._execution_engine.queue_callback(end)
                self._shown.hide()
            self._complete()
            self._gather(self._cut_chunks(numbers), "backward")

    def backward_ended(self, numbers: _Numbers) -> None:
        """That of a unit which uses these has, in one of its calls."""
        with self._lock:
            self._awaited.backward_ended(self._cut_chunks(numbers))

    @torch.no_grad()
    def _complete(self) -> None:
        """Units whose backwards have ended before this get no more gradients."""
        for chunk in self._awaited.take_complete():
            self._data.gathered.release((chunk,))
            self._reductions.complete(chunk)

    def open(self, numbers: Iterable[int]) -> None:
        """Parameters have bytes until `close`. All ranks must ask for it, and write the same."""
        with self._lock:
            chunks = self._cut_chunks(numbers)
            self._opened.update(chunks)
            self._begin(chunks)
            for chunk in chunks:
                self._data.gathered.finish(chunk)

    @torch.no_grad()
    def close(self, numbers: Iterable[int]) -> None:
        """What parameters that are open are now is what they are from now on."""
        with self._lock:
            chunks = self._cut_chunks(numbers)
            for chunk in chunks:
                self._data.parameters.chunk(chunk).copy_(self._data.gathered.part(chunk))
            self._opened.subtract(chunks)
            self._data.gathered.release(chunk for chunk in chunks if not self._opened[chunk])

    def _cut_chunks(self, numbers: Iterable[int]) -> _Chunks:
        chunks = dict.fromkeys(self._data.chunk_of(number) for number in numbers)
        return tuple(chunk for chunk in chunks if self._data.is_cut[chunk])

    def _gather(self, chunks: _Chunks, phase: _Phase) -> None:
        if not chunks:
            return
        self._begin(chunks)
        for chunk in chunks:
            self._data.gathered.finish(chunk)
        if self._last is not None:
            self._next[self._last] = chunks
        self._last = phase, chunks
        self._begin(self._next.get(self._last, ()))

    def _begin(self, chunks: Iterable[int]) -> None:
        for chunk in chunks:
            if self._reductions.is_under_way(chunk):
                self._reductions.finish()
            self._make_parameters(chunk)
            self._data.gathered.begin(chunk, self._data.parameters.chunk(chunk))

    # --- gradients and the optimizer ---

    def gradient(self, number: int) -> torch.Tensor:
        """What this rank has of the mean of all ranks' gradients."""
        chunk = self._data.chunk_of(number)
        if not self._data.is_cut[chunk]:
            return super().gradient(number)
        return self._data.part_of(self._reductions.parts[chunk], number)

    def settle_gradients(self) -> None:
        """Gradients are reduced, and each that came on any rank has come here."""
        with self._lock:
            self._abandon_backward()
            self._reductions.finish()
            if (come := self._reductions.have_come()) and not self._shown.are_wanted(come):
                self.forget_gradients()
            for number in self._reductions.came_elsewhere():
                self._shown.show(number)
            self._shown.check()

    def forget_gradients(self) -> None:
        """The program has dropped all of them."""
        with self._lock:
            self._abandon_backward()
            self._reductions.forget()
            self._shown.forget()

    def restore_gradient(self, number: int, gradient: torch.Tensor) -> None:
        """An update has failed: the gradient is wanted still."""
        if self._data.is_cut[self._data.chunk_of(number)]:
            self._shown.show(number)
        else:
            super().restore_gradient(number, gradient)

    def give_back(self, numbers: Iterable[int]) -> None:
        """Parameters whose bytes are gradients get theirs back; the gradients, if still wanted, move."""
        numbers = tuple(numbers)
        self._settle(numbers)
        with self._lock:
            self._reductions.finish()
            for chunk in self._cut_chunks(numbers):
                self._make_parameters(chunk)

    @torch.no_grad()
    def renew(self, number: int, *, made: bool = False) -> None:
        """The parameter's bytes are made from its master, or have been `made`."""
        with self._lock:
            if not self._data.is_cut[self._data.chunk_of(number)]:
                super().renew(number, made=made)
                return
            self.states.free(number)
            if not made and self._data.masters[number] is not None:
                self._data.parameter_part(number).copy_(self._data.master(number))
            self.states.move(number, TensorState.HOLD)

    def leave_gradient_to_others(self, number: int, *, is_used_up: bool = False) -> None:
        """Nobody else has it."""

    def note_written(self, number: int) -> None:
        """Between calls there is nothing that a program could write to."""
        if not self._data.is_cut[self._data.chunk_of(number)]:
            super().note_written(number)

    def step_ended(self) -> None:
        """Gradients have been used up."""
        with self._lock:
            super().step_ended()
            self.forget_gradients()
            self._awaited.forget()

    def _make_parameters(self, chunk: int) -> None:
        """Where this rank's part of a chunk has become gradients."""
        there = [one for one in self._data.in_chunk[chunk] if self._is_no_parameter(one)]
        if not there:
            return
        part = self._reductions.parts.pop(chunk, None)
        if part is not None and (self._is_in_backward() or self._shown.are_wanted(there)):
            self._chunks_apart.add(chunk)
            self._reductions.parts[chunk] = part.clone()
        for number in there:
            self.renew(number)

    def _place_of(self, chunk: int) -> torch.Tensor:
        """For the reduced gradients of a chunk."""
        part = self._data.parameters.chunk(chunk)
        trained = [one for one in self._data.in_chunk[chunk] if self._data.tensors[one].group is not None]
        used = chunk in self._data.gathered.open or any(self.states[one] is TensorState.COMPUTE for one in trained)
        if not self._reuse or chunk in self._chunks_apart or used:
            return torch.empty_like(part)
        for number in trained:
            self.states.free(number)
            self.states.move(number, TensorState.HOLD_AFTER_BWD)
        return part

    @torch.no_grad()
    def _gradient_arrived(self, number: int) -> None:
        chunk = self._data.chunk_of(number)
        if not self._data.is_cut[chunk]:
            super()._gradient_arrived(number)
            return
        gradient = self._data.tensors[number].parameter.grad
        if gradient is None:
            return
        self._check_gradient(number, gradient)
        with self._lock:
            self._data.tensors[number].parameter.grad = None
            self._reductions.arrived(number, gradient)

    def _check_gradient(self, number: int, gradient: torch.Tensor) -> None:
        super()._check_gradient(number, gradient)
        if gradient.requires_grad:
            raise ChunkError(
                f"expected gradients without graphs, found one with create_graph=True for "
                f"{self._data.tensors[number].name}; over several ranks take it from torch.autograd.grad"
            )

    def _end_backward(self) -> None:
        with self._lock, torch.no_grad():
            self._complete()
            self._running = None
            self._awaited.end()
            self._release_all()
            self._last = None
            here = self._whole.have_come()
            self._whole.reduce()
            self._reductions.end_backward(here)
            self._shown.show_all()

    def _is_in_backward(self) -> bool:
        return self._running is not None and self._running() is not None

    def _abandon_backward(self) -> None:
        """If the last one has failed."""
        if self._running is not None and self._running() is None:
            self._running = None
            self._release_all()
            self._reductions.abandon_backward()
            self._awaited.end()
            self._shown.show_all()

    def _release_all(self) -> None:
        """But what somebody computes with."""
        self._data.gathered.release(
            chunk
            for chunk in self._data.gathered.open
            if all(self.states[one] is not TensorState.COMPUTE for one in self._data.in_chunk[chunk])
        )


def _in_graph_task() -> bool:
    return torch._C._current_graph_task_id() != -1
