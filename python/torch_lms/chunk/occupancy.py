"""What the bytes of a parameter are: the parameter, or its gradient.

Note [Gradients in the place of parameters]
Once a parameter's last use in backward is over, its bytes are not needed any more: the optimizer makes new ones from
the master. So its gradient is copied there, and a model needs no memory for gradients (PatrickStar,
arXiv 2108.05818). Autograd tells when: it accumulates a parameter's gradient when all nodes that contribute to it have
run.

Meanwhile the parameter has no bytes, and its version has changed. Whoever asks for them gets an error, and so does a
backward of another graph that has saved the parameter. A module that is called
gets its parameters back first, made from the masters, and the gradients move to memory of their own. A program in which
that happens to a parameter (gradients are accumulated, say) keeps that one's gradients apart from then on.

The copy is not made where a graph is kept for another backward, where gradients have graphs themselves, and where a
parameter was used by several calls of the model since the last step: each may have a backward of its own.
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable

import torch

from torch_lms._core import core
from torch_lms.chunk.model_data import ModelData, same_bytes
from torch_lms.chunk.states import TensorState, TensorStates
from torch_lms.errors import ChunkError

__all__ = ["Occupancy"]

_NO_BYTES = (
    "expected {name} to be used before its backward, by a module that is called, or after optimizer.step(); its bytes "
    "hold its gradient now: call optimizer.step() first, or torch_lms.chunked(..., reuse_gradients=False)"
)

_OWN_REFERENCES = 2  # to the gradient, where they are counted

_VIEWED = (
    "expected nobody to keep a view of the gradient of {name}, whose bytes become the parameter's now, found one; use "
    "clone() of what is to be kept, or torch_lms.chunked(..., reuse_gradients=False). From the next backward on its "
    "gradients have memory of their own"
)


class Occupancy:
    """Keeps the states of a model's parameters, and puts gradients into their place.

    Thread-safe: autograd's threads bring gradients.

    Args:
        data: of the model.
        reuse: whether gradients take the place of parameters.
        gradient_ready: called without the lock when a tensor's gradient is final; gets its number.
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
        self.states = TensorStates(one.name for one in data.tensors)
        self._data = data
        self._reuse = reuse
        self._gradient_ready = gradient_ready
        self._settle = settle
        self._lock = threading.RLock()
        self._apart: set[int] = set()  # whose gradients have memory of their own
        self._call: list[int | None] = [None] * len(data.tensors)  # that has used each since the last step
        self._called_again: set[int] = set()  # what several calls have used
        self._aliases: dict[int, torch.Tensor] = {}  # gradients in parameters' places, as the program has them
        self._taken: dict[int, torch.UntypedStorage] = {}  # what parameters without bytes have instead
        self._versions = [one.parameter._version for one in data.tensors]
        for number, one in enumerate(data.tensors):
            if one.group is not None:
                one.parameter.register_post_accumulate_grad_hook(self._hook_of(number))

    # --- modules ---

    def call_begins(self, numbers: Iterable[int], call: int | None) -> None:
        """A module that nobody of the model calls, and that may use these, is about to run.

        Args:
            numbers: of tensors.
            call: its number; None inside of a backward.
        """
        self.give_back(numbers)
        if call is not None and torch.is_grad_enabled():
            with self._lock:
                for number in numbers:
                    if self._call[number] not in (None, call):
                        self._called_again.add(number)
                    self._call[number] = call

    def access(self, numbers: Iterable[int]) -> None:
        """A module that uses these is about to run."""
        with self._lock:
            for number in numbers:
                if self._is_no_parameter(number):  # by a backward inside of this call
                    self.give_back((number,))
                self.states.access(number)

    def release(self, numbers: Iterable[int]) -> None:
        """It has run."""
        with self._lock:
            for number in numbers:
                self.states.release(number, TensorState.HOLD_AFTER_FWD)

    def call_ended(self, numbers: Iterable[int]) -> None:
        """What runs again from now on does so for a backward."""
        with self._lock:
            for number in numbers:
                if self.states[number] is TensorState.HOLD_AFTER_FWD:
                    self.states.move(number, TensorState.HOLD)

    def nobody_runs(self) -> None:
        """No module does, on any thread: all calls have ended."""
        with self._lock:
            self.states.forget_accesses()
            self.call_ended(range(len(self.states)))

    def give_back(self, numbers: Iterable[int]) -> None:
        """Parameters whose bytes are gradients get theirs back; the gradients, if still wanted, move."""
        numbers = tuple(numbers)
        self._settle(numbers)
        with self._lock:
            for number in numbers:
                if self._is_no_parameter(number):
                    if self._data.tensors[number].parameter.grad is not None:
                        self._apart.add(number)
                    self.leave_gradient_to_others(number)
                    self.note_written(number)
                    self.renew(number)

    def open(self, numbers: Iterable[int]) -> None:
        """Somebody is about to write to parameters that have been given back."""

    def close(self, numbers: Iterable[int]) -> None:
        """It has been done, and noted."""

    # --- gradients and the optimizer ---

    def gradient(self, number: int) -> torch.Tensor:
        """Of a tensor whose parameter has one: what the optimizer is to use."""
        gradient = self._data.tensors[number].parameter.grad
        assert gradient is not None
        return gradient

    def settle_gradients(self) -> None:
        """All that are on their way have come."""

    def forget_gradients(self) -> None:
        """The program has dropped all of them."""

    def restore_gradient(self, number: int, gradient: torch.Tensor) -> None:
        """An update that was to use it up has failed."""
        self._data.tensors[number].parameter.grad = gradient

    def renew(self, number: int, *, made: bool = False) -> None:
        """The parameter's bytes are made from its master, or have been `made`."""
        parameter, view = self._data.tensors[number].parameter, self._data.views[number]
        with self._lock, torch.inference_mode(False), torch.no_grad():
            self.states.free(number)
            if same_bytes(parameter, view):
                torch.autograd.graph.increment_version(parameter)
            else:
                parameter.data = view
            if not made:
                view.copy_(self._data.master(number))
            self.states.move(number, TensorState.HOLD)
            self._versions[number] = parameter._version
            self._taken.pop(number, None)

    def leave_gradient_to_others(self, number: int, *, is_used_up: bool = False) -> None:
        """The gradient's place is about to be written: the tensor gets memory of its own, if anybody wants it still.

        Args:
            number: of the parameter.
            is_used_up: it is not wanted any more for being the parameter's gradient.
        """
        alias, one = self._aliases.pop(number, None), self._data.tensors[number]
        if alias is None:
            return
        is_gradient = one.parameter.grad is alias
        try:
            if is_gradient:
                one.parameter.grad = None  # it counts, too
            is_held = sys.getrefcount(alias) > _OWN_REFERENCES
            is_viewed = (
                alias._use_count() > 1  # type: ignore[attr-defined]  # a view, or a graph, refers to it
                or core.counts_writes_with_others(alias)  # as what `detach()` gives does
            )
        finally:
            if is_gradient:
                one.parameter.grad = alias
        if is_viewed and number not in self._apart:
            self._apart.add(number)
            warnings.warn(_VIEWED.format(name=one.name), stacklevel=2)
        if is_held or (is_gradient and not is_used_up):
            with torch.inference_mode(False), torch.no_grad():
                alias.data = alias.clone()

    def note_written(self, number: int) -> None:
        """If the program has written to a parameter itself, its master takes over what differs from its own bits.

        Raises:
            ChunkError: if the parameter lies elsewhere, on another device.
        """
        one, view = self._data.tensors[number], self._data.views[number]
        has_no_bytes = self._is_no_parameter(number)
        moved = not same_bytes(one.parameter, view)
        if has_no_bytes and (not moved or self._are_taken(number)):
            return
        if not moved and one.parameter._version == self._versions[number]:
            return
        if one.parameter.shape != view.shape or one.parameter.device != view.device:
            raise ChunkError(
                f"expected {one.name} to stay as torch_lms.chunked has found it, {tuple(view.shape)} on {view.device}, "
                f"found {tuple(one.parameter.shape)} on {one.parameter.device}; change the model before"
            )
        with torch.inference_mode(False), torch.no_grad():
            master = self._data.master(number)
            if moved or not one.wide:
                written = one.parameter.detach().to(master.device)
                same = written == master.to(written.dtype)
                master.copy_(torch.where(same, master, written.float()))
            if moved and not has_no_bytes:
                view.copy_(one.parameter)
                one.parameter.data = view
        self._versions[number] = one.parameter._version

    def step_ended(self) -> None:
        """Gradients have been used up: calls of the model are counted anew."""
        self._call = [None] * len(self._call)
        self._called_again.clear()

    def keeps_apart(self, number: int) -> bool:
        """Whether the tensor's gradients have memory of their own."""
        return not self._reuse or number in self._apart or self._data.tensors[number].wide

    def _hook_of(self, number: int) -> Callable[[torch.Tensor], None]:
        found = weakref.ref(self)  # the parameter keeps the hook, which must not keep the parameter

        def hook(_: torch.Tensor) -> None:
            if (occupancy := found()) is not None:
                occupancy._gradient_arrived(number)

        return hook

    @torch.no_grad()
    def _gradient_arrived(self, number: int) -> None:
        gradient = self._data.tensors[number].parameter.grad
        if gradient is None:
            return
        self._check_gradient(number, gradient)
        with self._lock:
            if self.states[number] is TensorState.HOLD_AFTER_BWD:
                return  # it has been accumulated in its place
            self.note_written(number)
            if self._may_take_the_place(number, gradient):
                self._put_in_place(number, gradient)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            self._gradient_ready(number)

    def _put_in_place(self, number: int, gradient: torch.Tensor) -> None:
        """The parameter is FREE meanwhile: an interrupt leaves bytes that are neither."""
        one, view = self._data.tensors[number], self._data.views[number]
        alias = self._data.parameter_view(number)
        self.states.free(number)
        view.copy_(gradient)
        torch.autograd.graph.increment_version(one.parameter)
        one.parameter.grad = self._aliases[number] = alias
        core.take_bytes(one.parameter, _NO_BYTES.format(name=one.name))
        self._taken[number] = one.parameter.untyped_storage()
        self.states.move(number, TensorState.HOLD_AFTER_BWD)

    def _are_taken(self, number: int) -> bool:
        """Whether the parameter's bytes are, and nobody has given it others since."""
        taken = self._taken.get(number)
        return taken is not None and self._data.tensors[number].parameter.untyped_storage()._cdata == taken._cdata

    def _is_no_parameter(self, number: int) -> bool:
        """Whether the bytes are a gradient, or mean nothing, since an interrupt has left them so."""
        return self.states[number] in (TensorState.HOLD_AFTER_BWD, TensorState.FREE)

    def _check_gradient(self, number: int, gradient: torch.Tensor) -> None:
        if gradient.layout is not torch.strided:
            raise ChunkError(
                f"expected dense gradients, found a {gradient.layout} one for {self._data.tensors[number].name}; build "
                "its module with sparse=False"
            )

    def _may_take_the_place(self, number: int, gradient: torch.Tensor) -> bool:
        return (
            not self.keeps_apart(number)
            and number not in self._called_again
            and self.states[number] is not TensorState.COMPUTE
            and not gradient.requires_grad
            and not torch._C._autograd._get_current_graph_task_keep_graph()
        )
