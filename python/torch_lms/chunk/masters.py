"""The optimizer that was given, on the masters of some tensors at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from torch_lms.chunk.model_data import ModelData

__all__ = ["Masters"]


@dataclass(frozen=True)
class _InChunks:
    """Stands for a state that is in chunks."""

    dtype: torch.dtype


class Masters:
    """Has an optimizer's own `step` update masters, those of one chunk after the other.

    What the optimizer keeps for a tensor, in its shape, lies in chunks from its first step on.

    Thread-safe for different tensors; hyperparameters are read from the groups when a step begins.

    Args:
        inner: the optimizer; its groups have the model's parameters, its state is by master.
        data: of the model.
    """

    def __init__(self, inner: Optimizer, data: ModelData) -> None:
        self._inner = inner
        self._data = data
        self._adopted: list[dict[str, torch.Tensor]] = [{} for _ in data.tensors]
        self._noted: dict[int, dict[str, Any]] = {}  # by group
        for number, one in enumerate(data.tensors):
            if one.group is None or one.parameter not in inner.state:
                continue
            state = {key: _as_wide(value, one.parameter) for key, value in inner.state.pop(one.parameter).items()}
            if data.masters[number] is not None:
                inner.state[data.master(number)] = self._own_parts(number, state)
                self._adopt(number)

    @torch.no_grad()
    def step(self, numbers: Sequence[int], gradients: Iterable[torch.Tensor]) -> None:
        """Updates the masters of some tensors.

        Args:
            numbers: of the tensors.
            gradients: of these, 32-bit numbers where the masters are.
        """
        for number, gradient in zip(numbers, gradients, strict=True):
            self._data.master(number).grad = gradient
        try:
            by_group = self._by_group(numbers)
            stepper = self._for(by_group)
            step: Any = type(stepper).step
            step = step.__wrapped__ if getattr(step, "hooked", False) else step  # hooks are for whole steps
            step(stepper)
            self._note(by_group, stepper)
        finally:
            for number in numbers:
                self._data.master(number).grad = None
        for number in numbers:
            self._adopt(number)

    def state_of(self, number: int) -> dict[str, Any]:
        """What the optimizer keeps for a tensor; empty before its first step."""
        found: dict[str, Any] = self._inner.state.get(self._data.tensor_to_update(number), {})
        return found

    def whole_states(self) -> dict[int, dict[str, Any]]:
        """What the optimizer keeps, by tensor: all ranks', who must all ask for it."""
        if self._data.ranks.group is None:
            return {number: state for number in range(len(self._data.tensors)) if (state := self.state_of(number))}
        found: dict[int, dict[str, Any]] = {}
        for states in self._data.ranks.all_of(self._described()):
            for number, state in states.items():
                found.setdefault(number, state)
        return {
            number: {
                key: self._data.whole_state(key, value.dtype, number) if isinstance(value, _InChunks) else value
                for key, value in found[number].items()
            }
            for number in sorted(found)
        }

    def own_states(self) -> dict[int, dict[str, tuple[Any, bool]]]:
        """What this rank has of what the optimizer keeps, by tensor and key, and whether it lies in chunks."""
        return {
            number: {key: (value, key in self._adopted[number]) for key, value in state.items()}
            for number in range(len(self._data.tensors))
            if (state := self.state_of(number))
        }

    @torch.no_grad()
    def make_state(self) -> None:
        """Has the optimizer keep for each tensor what it would before its first step.

        It does one on zeros, at no learning rate, of which nothing stays but its state.
        """
        rates = [group.get("lr") for group in self._inner.param_groups]
        try:
            for group in self._inner.param_groups:
                group["lr"] = torch.zeros_like(rate) if isinstance(rate := group.get("lr"), torch.Tensor) else 0.0
            for numbers in self._data.in_chunk:
                new = [one for one in numbers if self._data.masters[one] is not None and not self.state_of(one)]
                before = [self._data.master(one).clone() for one in new]
                if new:
                    self.step(new, [torch.zeros_like(one) for one in before])
                for number, master in zip(new, before, strict=True):
                    self._data.master(number).copy_(master)
                    if isinstance(step := self.state_of(number).get("step"), torch.Tensor):
                        step.zero_()
        finally:
            for group, rate in zip(self._inner.param_groups, rates, strict=True):
                group["lr"] = rate
            self._noted.clear()

    @torch.no_grad()
    def take_loaded(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """What does not lie in chunks of the states that have been loaded, by the tensors' names."""
        for number, state in self.own_states().items():
            loaded = states[self._data.tensors[number].name]
            self.state_of(number).update({key: loaded[key] for key, (_, in_chunks) in state.items() if not in_chunks})

    def _described(self) -> dict[int, dict[str, Any]]:
        """This rank's states: what is in chunks by its type alone."""
        return {
            number: {
                key: _InChunks(value.dtype) if key in self._adopted[number] else value for key, value in state.items()
            }
            for number in range(len(self._data.tensors))
            if (state := self.state_of(number))
        }

    def _own_parts(self, number: int, state: Mapping[str, Any]) -> dict[str, Any]:
        """Of what is of a parameter's shape, what goes to this rank's part of its chunk."""
        shape = self._data.views[number].shape
        return {
            key: self._data.own_part(number, value)
            if isinstance(value, torch.Tensor) and value.shape == shape
            else value
            for key, value in state.items()
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a state dict of the optimizer's."""
        by_group = {
            place: [self._data.numbers[one] for one in group["params"]]
            for place, group in enumerate(self._inner.param_groups)
        }
        stepper = self._for(by_group)
        stepper.load_state_dict(self._own_state_dict(state_dict))
        self._note(by_group, stepper)
        self.take_noted()
        self._inner.state = stepper.state
        for numbers in by_group.values():
            for number in numbers:
                if self._data.tensors[number].group is not None:
                    self._adopt(number)

    def _own_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """What this rank keeps of it."""
        if self._data.ranks.group is None:
            return state_dict
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        numbers = [self._data.numbers[one] for group in self._inner.param_groups for one in group["params"]]
        kept = {
            name: self._own_parts(number, state_dict["state"][name])
            for name, number in zip(names, numbers, strict=False)  # the optimizer says what does not match
            if name in state_dict["state"] and self._data.masters[number] is not None
        }
        return {**state_dict, "state": kept}

    def take_noted(self) -> None:
        """What the optimizer has noted in groups holds: once for all chunks, for it may count steps."""
        for place, noted in self._noted.items():
            group = self._inner.param_groups[place]
            for key, value in noted.items():
                if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                    group[key].copy_(value)  # somebody may have the tensor
                else:
                    group[key] = value
        self._noted.clear()

    def _for(self, by_group: Mapping[int, Sequence[int]]) -> Optimizer:
        """The optimizer, with the same state, as one of nothing but the masters of some tensors."""
        groups = self._inner.param_groups
        stepper: Optimizer = object.__new__(type(self._inner))
        stepper.__dict__.update(self._inner.__dict__)
        stepper.param_groups = [
            {
                **{
                    key: value.clone() if isinstance(value, torch.Tensor) else value
                    for key, value in groups[place].items()
                },
                "params": [self._data.tensor_to_update(number) for number in numbers],
            }
            for place, numbers in by_group.items()
        ]
        return stepper

    def _by_group(self, numbers: Iterable[int]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for number in numbers:
            place = self._data.tensors[number].group
            assert place is not None
            found.setdefault(place, []).append(number)
        return found

    def _note(self, by_group: Mapping[int, Sequence[int]], stepper: Optimizer) -> None:
        for place, group in zip(by_group, stepper.param_groups, strict=True):
            self._noted[place] = {key: value for key, value in group.items() if key != "params"}

    def _adopt(self, number: int) -> None:
        if state := self.state_of(number):
            state.update(self._data.adopt(number, state, self._adopted[number]))


def _as_wide(value: Any, parameter: torch.Tensor) -> Any:
    """What an optimizer has kept for a 16-bit parameter, for its master."""
    narrow = isinstance(value, torch.Tensor) and value.is_floating_point() and value.element_size() < 4
    return value.float() if narrow and value.shape == parameter.shape else value
