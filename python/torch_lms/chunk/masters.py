"""The optimizer that was given, on the masters of some tensors at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from torch_lms.chunk.model_data import ModelData

__all__ = ["Masters"]


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
            if one.group is not None and one.parameter in inner.state:
                inner.state[data.master(number)] = {
                    key: _as_wide(value, data.master(number)) for key, value in inner.state.pop(one.parameter).items()
                }
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

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a state dict of the optimizer's."""
        by_group = {
            place: [self._data.numbers[one] for one in group["params"]]
            for place, group in enumerate(self._inner.param_groups)
        }
        stepper = self._for(by_group)
        stepper.load_state_dict(state_dict)
        self._note(by_group, stepper)
        self.take_noted()
        self._inner.state = stepper.state
        for numbers in by_group.values():
            for number in numbers:
                if self._data.tensors[number].group is not None:
                    self._adopt(number)

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


def _as_wide(value: Any, master: torch.Tensor) -> Any:
    """What an optimizer has kept for a 16-bit parameter, for its master."""
    narrow = isinstance(value, torch.Tensor) and value.is_floating_point() and value.element_size() < 4
    return value.float() if narrow and value.shape == master.shape else value
