"""An optimizer that steps chunk by chunk, on masters."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from torch_lms.chunk.clipping import clip_grad_norm_
from torch_lms.chunk.hooks import ModuleHooks
from torch_lms.chunk.host_updates import HostUpdates
from torch_lms.chunk.masters import Masters
from torch_lms.chunk.model_data import ModelData
from torch_lms.chunk.occupancy import Occupancy
from torch_lms.chunk.placement import Residence, UpdateChoice
from torch_lms.chunk.streamed_updates import StreamedUpdates
from torch_lms.chunk.timeline import Timeline
from torch_lms.chunk.trials import treats_each_element_alone
from torch_lms.chunk.update_groups import UpdateGroups
from torch_lms.chunk.updates import Updates
from torch_lms.errors import ChunkError

__all__ = ["WITHOUT_STATE", "ChunkedOptimizer"]

WITHOUT_STATE = "without_state"
"""In the groups of sharded states: names of tensors that the optimizer kept nothing for."""


class ChunkedOptimizer(Optimizer):
    """The given optimizer, on the masters of a model in chunks.

    A chunk's gradients are made 32-bit numbers, its masters are updated by the given optimizer's own `step`, and its
    parameters are made from these. Parameter groups are those of the given optimizer: schedulers of either work.

    Not thread-safe, as optimizers are not; in backward it is called by autograd's threads, one chunk after the other.

    Args:
        inner: the optimizer that was given.
        data: of the model.
        choice: of where masters are updated.
    """

    grad_scale: torch.Tensor | None
    found_inf: torch.Tensor

    def __init__(self, inner: Optimizer, data: ModelData, choice: UpdateChoice) -> None:
        self._ready = False
        self._whole_states: defaultdict[torch.Tensor, Any] | None = defaultdict(
            dict
        )  # instead of `state`, while there is none
        self._data = data
        self._choice = choice
        # GradScaler leaves gradients scaled then, and says by how much.
        self._step_supports_amp_scaling = data.dtype == torch.float16
        super().__init__([{"params": group["params"]} for group in inner.param_groups], inner.defaults)
        self.param_groups = inner.param_groups  # the same dictionaries: schedulers may have either optimizer
        self._inner = inner
        self._optimizer_step_pre_hooks = inner._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = inner._optimizer_step_post_hooks
        inner._optimizer_step_pre_hooks, inner._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self._masters = Masters(inner, data)
        self._elsewhere: Updates | None = None  # of chunks that are on the host
        self._under_way: set[int] = set()  # there
        self._updating = threading.RLock()  # held while updates are started, and waited for
        self._groups = UpdateGroups()
        self._whole_states = None
        self._ready = True

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """What the given optimizer keeps, by parameter, as far as this rank has it; the dictionary is a new one."""
        if self._whole_states is not None:
            return self._whole_states
        self.settle()
        self._data.settle_masters()
        kept = self._masters.tensors_with_state()
        return defaultdict(dict, {self._data.tensors[one].parameter: self._masters.state_of(one) for one in kept})

    @state.setter
    def state(self, _: Any) -> None:
        """Optimizers begin with one of their own."""

    @property
    def data(self) -> ModelData:
        """Of the model."""
        return self._data

    @property
    def update_choice(self) -> UpdateChoice:
        """Where masters are updated, and the rates that this was chosen by, where it was."""
        return self._choice

    def attach(self, occupancy: Occupancy, hooks: ModuleHooks, *, device_bytes: int, fills: bool) -> None:
        """Gives the optimizer what knows where parameters are; `torch_lms.chunked` calls it before anything else.

        Args:
            occupancy: of the parameters.
            hooks: of the modules.
            device_bytes: that the program may use on the device.
            fills: whether chunks that are on the host come to the device, as far as there is room.
        """
        self._residence = Residence(self._data, self._masters, device_bytes) if fills else None
        self._occupancy = occupancy
        self._hooks = hooks
        if any(self._data.on_host) and self._data.update_on == "host":
            self._elsewhere = HostUpdates(
                self._data, self._masters, ended=self._came, failed=self._occupancy.restore_gradient
            )
        elif any(self._data.on_host):
            cut = treats_each_element_alone(self._inner, self._data.device)
            self._elsewhere = StreamedUpdates(
                self._data, self._masters, cut=cut, device_bytes=device_bytes, ended=self._came
            )
        for chunk, numbers in enumerate(self._data.in_chunk):
            groups = [] if self._elsewhere is None else self._elsewhere.groups(chunk)
            rest = [number for number in numbers if not any(number in together for together in groups)]
            for together in [*groups, rest]:
                self._groups.add(together, {one for one in together if self._data.tensors[one].group is not None})

    def __reduce__(self) -> Any:
        """Never.

        Raises:
            ChunkError: always: a copy could not update the model's chunks.
        """
        raise ChunkError("expected one optimizer of chunks, found it being copied or pickled; use its state_dict()")

    @contextmanager
    def record_updates(self) -> Iterator[Timeline]:
        """Records when the updates of a step run that is made inside of it, its backward and `step`.

        Afterwards the timeline says how much of them was hidden behind the backward; what is updated where its masters
        are, on the device, is not in it. To record takes little time, but waits for the device before and after.
        """
        timeline = Timeline(self._data.device)
        hooks = [
            one.parameter.register_hook(timeline.gradient_came)
            for one in self._data.tensors
            if one.parameter.requires_grad
        ]
        timeline.begin()
        if self._elsewhere is not None:
            self._elsewhere.timeline = timeline
        try:
            yield timeline
            self.settle()
        finally:
            if self._elsewhere is not None:
                self._elsewhere.timeline = None
            for hook in hooks:
                hook.remove()
        timeline.end()

    def settle(self, numbers: Iterable[int] | None = None) -> None:
        """Waits until all updates that are under way beside the program are over.

        Args:
            numbers: of tensors; nothing is waited for if none of them is being updated. All if left out.

        Raises:
            Exception: what an update failed with.
        """
        if self._elsewhere is None:
            return
        with self._updating:  # who finds that another thread waits may go on no sooner
            if numbers is not None and self._under_way.isdisjoint(numbers):
                return
            try:
                self._elsewhere.wait()
            except Exception:
                self._under_way.clear()
                raise
            self._under_way.clear()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """`torch.nn.utils.clip_grad_norm_` of all gradients, wherever they are.

        Over several ranks each adds up its parts: every rank must call it, and gets the norm of all.

        Args:
            max_norm: that gradients have at most afterwards.
            norm_type: which norm; may be ``inf``.

        Returns:
            The norm before: in the gradients' type, as PyTorch's own; over several ranks in 32 bits.

        Raises:
            ChunkError: over several ranks, for a norm that is not positive; if backward has used gradients up.
        """
        if self._groups.updated:
            raise ChunkError(
                f"expected gradients, found {len(self._groups.updated)} parameters that backward has updated already; "
                "call torch_lms.chunked(..., step_in_backward=False) to clip them"
            )
        return clip_grad_norm_(self._data, self._occupancy, max_norm, norm_type)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses another group: chunks are laid out for those that there were.

        Raises:
            ChunkError: always, once the optimizer is made.
        """
        if self._ready:
            raise ChunkError(
                "expected parameter groups to be complete, found a new one; add it before torch_lms.chunked"
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates every parameter that has a gradient.

        Args:
            closure: evaluates the model again, and returns the loss; called once.

        Raises:
            ChunkError: if GradScaler skips a step whose updates backward has made.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._hooks.abandon_calls()
        if float(getattr(self, "found_inf", 0)):
            self._skip()
            return loss
        self._occupancy.settle_gradients()
        self._check_frozen()
        for numbers in self._groups.left(self._has_gradient):
            self._update(numbers)
        self.settle()
        self._end_step()
        self._inner._opt_called = True  # type: ignore[attr-defined]  # a scheduler may have been made for it
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets gradients, or zeroes them; parameters whose bytes they had get theirs back.

        After a backward that has failed, with `step_in_backward`: what it has updated stays so, and the step has ended.

        Raises:
            ChunkError: if they are to be zeroed, and are spread over ranks.
        """
        if not set_to_none and self._data.ranks.group is not None:
            raise ChunkError("expected zero_grad() over several ranks, found set_to_none=False; leave it out")
        self._hooks.abandon_calls()
        self._groups.forget_gradients()  # of a backward that has failed
        if self._elsewhere is not None:
            self._elsewhere.abandon()
        if self._groups.updated:
            self.settle()
            self._end_step()
        if set_to_none:
            for one in self._data.tensors:
                one.parameter.grad = None
            self._occupancy.forget_gradients()
        self._occupancy.give_back(range(len(self._data.tensors)))
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """As the given optimizer's: keys, shapes and values."""
        self.settle()
        self._data.settle_masters()
        states = self._masters.whole_states()
        self._whole_states = defaultdict(dict)
        for group in self.param_groups:
            for parameter in group["params"]:
                if state := states.get(self._data.numbers[parameter]):
                    self._whole_states[parameter] = state
        try:
            return super().state_dict()
        finally:
            self._whole_states = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a `state_dict` of this optimizer, or of the given one, whatever its chunks were."""
        self.settle()
        self._data.settle_masters()
        for change in self._optimizer_load_state_dict_pre_hooks.values():
            changed = change(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._masters.load_state_dict(state_dict)
        for tell in self._optimizer_load_state_dict_post_hooks.values():
            tell(self)

    def own_states(self) -> dict[int, dict[str, tuple[Any, bool]]]:
        """What this rank has of its state, by tensor and key, and whether it lies in chunks.

        For tensors that have none yet: what it may be loaded to.
        """
        self.settle()
        self._data.settle_masters()
        self._masters.expect_states()
        return self._masters.own_states()

    def names_without_state(self) -> set[str]:
        """The tensors that it has no state for on any rank; every rank must ask for them."""
        without = {number for number, one in enumerate(self._data.tensors) if one.group is not None}
        without.difference_update(*self._data.ranks.all_of(self._masters.tensors_with_state()))
        return {self._data.tensors[number].name for number in without}

    @torch.no_grad()
    def take_loaded(self, loaded: dict[str, Any]) -> None:
        """Masters, and what lies in chunks, have been written to: parameters are made from them.

        Args:
            loaded: ``state``, by the tensors' names, and ``param_groups``, with the names `WITHOUT_STATE`.
        """
        self.zero_grad()
        without = {name for group in loaded["param_groups"] for name in group.get(WITHOUT_STATE, ())}
        self._masters.take_loaded(loaded["state"], without)
        for group, given in zip(self.param_groups, loaded["param_groups"], strict=True):
            group.update({key: value for key, value in given.items() if key not in ("params", WITHOUT_STATE)})
        for number, one in enumerate(self._data.tensors):
            if one.group is not None:
                self._occupancy.renew(number)
        self._data.unfilled.clear()

    def gradient_ready(self, number: int) -> None:
        """In backward: the last one of a chunk has the chunk updated.

        Raises:
            ChunkError: for a parameter that has been updated since the last step.
        """
        one = self._data.tensors[number]
        if number in self._groups.updated:
            one.parameter.grad = None
            self._occupancy.give_back((number,))
            raise ChunkError(
                f"expected optimizer.step() after each backward, found another gradient of {one.name}, which has been "
                "updated; call step (zero_grad after a backward that has failed), or "
                "torch_lms.chunked(..., step_in_backward=False)"
            )
        ready = self._groups.arrived(number)
        with torch.no_grad():
            self._update(ready)
        self._groups.updated.update(ready)

    def _has_gradient(self, number: int) -> bool:
        """One that the optimizer is to use."""
        one = self._data.tensors[number]
        return one.group is not None and one.parameter.grad is not None

    def _update(self, numbers: list[int]) -> None:
        """Of one group."""
        if not numbers:
            return
        for number in numbers:
            self._occupancy.leave_gradient_to_others(number, is_used_up=True)
            self._occupancy.note_written(number)
        scale = getattr(self, "grad_scale", None)
        here = [number for number in numbers if self._data.masters[number] is not None]
        given = [self._occupancy.gradient(number) for number in here]
        if here and self._elsewhere is not None and self._data.on_host[self._data.chunk_of(numbers[0])]:
            with self._updating:
                self._under_way.update(here)
                self._elsewhere.start(here, given, None if scale is None else scale.item())
            for number in numbers:
                self._data.tensors[number].parameter.grad = None
            return
        gradients = [
            torch.empty_like(self._data.tensor_to_update(one)).copy_(of) for one, of in zip(here, given, strict=True)
        ]
        if scale is not None:
            for gradient in gradients:
                gradient.div_(scale)
        self._masters.step(here, gradients)
        for number in numbers:
            self._data.tensors[number].parameter.grad = None
            self._occupancy.renew(number)

    def _came(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._data.tensors[number].parameter.grad = None
            self._occupancy.renew(number, made=True)

    def _check_frozen(self) -> None:
        """One that was frozen, and has a gradient now, has no master that could be updated."""
        for group in self.param_groups:
            for parameter in group["params"]:
                one = self._data.tensors[self._data.numbers[parameter]]
                if one.group is None and parameter.grad is not None:
                    raise ChunkError(
                        f"expected {one.name} to stay frozen, found a gradient of it; unfreeze it before "
                        "torch_lms.chunked"
                    )

    def _skip(self) -> None:
        if self._groups.updated:
            raise ChunkError(
                "expected a step that may be skipped, found updates that backward has made; "
                "call torch_lms.chunked(..., step_in_backward=False)"
            )
        self.zero_grad()
        self._end_step()

    def _end_step(self) -> None:
        self._masters.take_noted()
        if self._elsewhere is not None:
            self._elsewhere.step_ended()
        if self._residence is not None:
            self._residence.step_ended()
        self._groups.step_ended()
        self._occupancy.give_back(range(len(self._data.tensors)))  # whose gradients the program has dropped
        self._occupancy.step_ended()
