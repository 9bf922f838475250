"""The optimizer that was given, on the masters of some tensors at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from torch_lms.chunk.loading import check_shapes, check_state_dict
from torch_lms.chunk.model_data import ModelData
from torch_lms.chunk.trials import keys_in_shape
from torch_lms.chunk.values import Change, Copies, stand_in, step_without_hooks, take_over

__all__ = ["Masters", "Part"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A tensor, or a piece of one, that has been brought to be updated.

    Attributes:
        number: of the tensor.
        master: its numbers, which are updated; of the tensor's shape, or flat if it is a piece.
        gradient: of these; likewise.
        state: what lies in chunks of what the optimizer keeps, by key; likewise.
        whole: whether it is the tensor, or this rank's piece of it.
    """

    number: int
    master: torch.Tensor
    gradient: torch.Tensor
    state: Mapping[str, torch.Tensor]
    whole: bool


@dataclass(frozen=True)
class _Before:
    """What an optimizer has kept for a tensor before a step: what lies in chunks, and what lies beside them."""

    known: Mapping[str, torch.Tensor]
    beside: dict[str, Any]


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
        self._noted: dict[tuple[int, Any], Change] = {}  # by place; see Note [What a step counts]
        self._before: dict[int, _Before] = {}  # by tensor that comes in pieces
        self._expected: dict[int, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {}  # by tensor; see `expect_states`
        self._names = {
            data.numbers[parameter]: name
            for group in inner.param_groups
            for parameter, name in zip(group["params"], group.get("param_names", ()), strict=False)
        }
        small = {one.group for one in data.tensors if one.group is not None and one.parameter.numel() == 1}
        self._keys = {group: keys_in_shape(inner, inner.param_groups[group], data.device) for group in small}
        for number, one in enumerate(data.tensors):
            if one.group is None or one.parameter not in inner.state:
                continue
            state = {key: _as_wide(value, one.parameter) for key, value in inner.state.pop(one.parameter).items()}
            if data.masters[number] is not None:
                inner.state[data.tensor_to_update(number)] = self._own_parts(number, state)
                self._adopt(number)

    @torch.no_grad()
    def step(self, numbers: Sequence[int], gradients: Iterable[torch.Tensor]) -> None:
        """Updates the masters of some tensors.

        Args:
            numbers: of the tensors.
            gradients: of these, 32-bit numbers where the masters are.
        """
        masters = [self._data.tensor_to_update(number) for number in numbers]
        self._step(*self._for(numbers, masters), masters, gradients)
        for number in numbers:
            self._adopt(number)

    @torch.no_grad()
    def step_parts(self, parts: Sequence[Part]) -> list[dict[str, torch.Tensor]]:
        """Updates what has been brought. Pieces of a tensor come in any order; `parts_ended` when all have come.

        Returns:
            For each part what the optimizer has begun to keep in its shape, by key: it is to go to `view_of_new`.
        """
        masters = [part.master for part in parts]
        stepper, copies = self._for([part.number for part in parts], masters)
        stepper.state = defaultdict(dict)
        for part in parts:
            stepper.state[part.master] = {**self._beside(part), **part.state}
        self._step(stepper, copies, masters, [part.gradient for part in parts])
        return [self._take(part, stepper.state[part.master]) for part in parts]

    def parts_ended(self) -> None:
        """All pieces have come of the tensors of which any has."""
        self._before.clear()

    def known(self, number: int, *, whole: bool) -> Mapping[str, torch.Tensor]:
        """The places in chunks of what the optimizer keeps for a tensor, by key.

        Args:
            number: of the tensor.
            whole: it comes at once; otherwise it is what was kept before the first piece came.
        """
        if whole:
            return self._adopted[number]
        if number not in self._before:
            known, state = dict(self._adopted[number]), self.state_of(number)
            beside = {key: deepcopy(value) for key, value in state.items() if key not in known}
            self._before[number] = _Before(known, beside)
        return self._before[number].known

    def view_of_new(self, number: int, key: str, dtype: torch.dtype) -> torch.Tensor:
        """The place of what the optimizer begins to keep for a tensor; it is kept there from now on."""
        known = self._adopted[number]
        if key not in known or known[key].dtype != dtype:
            known[key] = self._data.known_view(number, key, dtype)
            self._inner.state[self._data.tensor_to_update(number)][key] = known[key]
        return known[key]

    def bring_home(self, chunk: int) -> None:
        """A chunk's masters and state, which were on the host, are on the device from now on."""
        self._data.bring_home(chunk)
        for number in self._data.in_chunk[chunk]:
            for key, kept in self._adopted[number].items():
                kept.data = self._data.known_view(number, key, kept.dtype)

    def _beside(self, part: Part) -> dict[str, Any]:
        """What does not lie in chunks: each piece begins with the same."""
        if part.whole:
            return {key: value for key, value in self.state_of(part.number).items() if key not in part.state}
        return deepcopy(self._before[part.number].beside)

    def _take(self, part: Part, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Keeps what does not lie in chunks; returns what is to."""
        kept, new = self._inner.state[self._data.tensor_to_update(part.number)], {}
        in_chunks = self._in_chunks(part.number, state, part.master.shape)
        for key, value in state.items():
            if key not in in_chunks:
                kept[key] = value
            elif key not in part.state or part.state[key].dtype != value.dtype:
                new[key] = value
            elif value is not part.state[key]:
                part.state[key].copy_(value)
        return new

    def _step(
        self,
        stepper: Optimizer,
        copies: Copies,
        masters: Sequence[torch.Tensor],
        gradients: Iterable[torch.Tensor],
    ) -> None:
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient
        try:
            step_without_hooks(stepper)
        finally:
            for master in masters:
                master.grad = None
        self._note(copies.changes())

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
        """What this rank has of what the optimizer keeps, by tensor and key, and whether it lies in chunks.

        What `expect_states` has found is among it.
        """
        kept = {number: (self.state_of(number), self._adopted[number]) for number in self.tensors_with_state()}
        return {
            number: {key: (value, key in in_chunks) for key, value in state.items()}
            for number, (state, in_chunks) in sorted({**kept, **self._expected}.items())
        }

    def tensors_with_state(self) -> list[int]:
        """Those that the optimizer keeps something for, on this rank."""
        return [number for number in range(len(self._data.tensors)) if self.state_of(number)]

    @torch.no_grad()
    def expect_states(self) -> None:
        """Finds out what the optimizer would keep for tensors that it keeps nothing for yet, and makes room for it.

        It does a step on zeros, at no learning rate, of which nothing stays: what it keeps is its state only if
        `take_loaded` says so. See `own_states`.
        """
        rates = [group.get("lr") for group in self._inner.param_groups]
        drawn = Copies(with_generators=True)
        drawn.of(vars(self._inner), but=("state",))
        device = self._data.device
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                self._expect_new()
        finally:
            drawn.restore_generators()
            for group, rate in zip(self._inner.param_groups, rates, strict=True):
                group["lr"] = rate
            self._noted.clear()

    def _expect_new(self) -> None:
        for group in self._inner.param_groups:
            group["lr"] = torch.zeros_like(rate) if isinstance(rate := group.get("lr"), torch.Tensor) else 0.0
        for numbers in self._data.in_chunk:
            new = [one for one in numbers if self._data.masters[one] is not None and not self.state_of(one)]
            new = [one for one in new if self._data.views[one].numel()]
            before = [self._data.tensor_to_update(one).clone() for one in new]
            if new:
                self.step(new, [torch.zeros_like(one) for one in before])
            for number, master in zip(new, before, strict=True):
                self._data.tensor_to_update(number).copy_(master)
                self._expected[number] = self._leave(number)

    @torch.no_grad()
    def take_loaded(self, states: Mapping[str, Mapping[str, Any]], without: Container[str]) -> None:
        """States have been loaded to the places of `own_states`.

        Args:
            states: by the tensors' names; of them what does not lie in chunks is taken.
            without: names of tensors that the optimizer kept nothing for.
        """
        for number, (state, in_chunks) in self._expected.items():
            self._inner.state[self._data.tensor_to_update(number)], self._adopted[number] = state, in_chunks
        self._expected.clear()
        for number, kept in self.own_states().items():
            name = self._data.tensors[number].name
            if name in without:
                self._leave(number)
                continue
            loaded = {key: states[name][key] for key, (_, in_chunks) in kept.items() if not in_chunks}
            self.state_of(number).update(loaded)

    def _leave(self, number: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Has the optimizer keep nothing for a tensor; returns what it has kept, and what of it lies in chunks."""
        in_chunks, self._adopted[number] = self._adopted[number], {}
        state: dict[str, Any] = self._inner.state.pop(self._data.tensor_to_update(number), {})
        return state, in_chunks

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
        in_chunks = self._in_chunks(number, state, self._data.views[number].shape)
        return {**state, **{key: self._data.own_part(number, value) for key, value in in_chunks.items()}}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a state dict of the optimizer's."""
        self._check(state_dict)
        by_group = [[self._data.numbers[one] for one in group["params"]] for group in self._inner.param_groups]
        places = {place: [(one, self._data.tensor_to_update(one)) for one in of] for place, of in enumerate(by_group)}
        stepper, copies = self._of(places)
        stepper.load_state_dict(self._own_state_dict(state_dict))
        self._note(copies.changes())
        for group, loaded in zip(self._inner.param_groups, stepper.param_groups, strict=True):
            self._note(Change(group, key, value) for key, value in loaded.items() if key != "params")
        self.take_noted()
        self._inner.state = stepper.state
        for numbers in by_group:
            for number in numbers:
                if self._data.tensors[number].group is not None:
                    self._adopted[number] = {}  # what is not loaded is not kept
                    self._adopt(number)

    def _check(self, state_dict: dict[str, Any]) -> None:
        """Before anything changes."""
        check_state_dict(state_dict)
        for name, number in self._named(state_dict):
            state, shape = state_dict["state"].get(name, {}), self._data.views[number].shape
            check_shapes(self._data.tensors[number].name, shape, list(self._adopted[number]), state)

    def _named(self, state_dict: dict[str, Any]) -> list[tuple[Any, int]]:
        """The names that a state dict has for tensors, and their numbers."""
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        numbers = [self._data.numbers[one] for group in self._inner.param_groups for one in group["params"]]
        return list(zip(names, numbers, strict=False))  # the optimizer says what does not match

    def _own_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """What this rank keeps of it."""
        if self._data.ranks.group is None:
            return state_dict
        kept = {
            name: self._own_parts(number, state_dict["state"][name])
            for name, number in self._named(state_dict)
            if name in state_dict["state"] and self._data.masters[number] is not None
        }
        return {**state_dict, "state": kept}

    def take_noted(self) -> None:
        """What the optimizer has changed, in groups or in itself, holds: once for all chunks."""
        take_over(self._noted.values())
        self._noted.clear()

    def _for(self, numbers: Sequence[int], tensors: Sequence[torch.Tensor]) -> tuple[Optimizer, Copies]:
        """The optimizer as one of nothing but some tensors, and what it may write to."""
        by_group: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for number, tensor in zip(numbers, tensors, strict=True):
            place = self._data.tensors[number].group
            assert place is not None
            by_group.setdefault(place, []).append((number, tensor))
        return self._of(by_group)

    def _of(self, by_group: Mapping[int, Sequence[tuple[int, torch.Tensor]]]) -> tuple[Optimizer, Copies]:
        """Likewise; by group, what the tensors are masters of, and they."""
        copies = Copies(self._inner.state)
        groups = [(self._inner.param_groups[place], [tensor for _, tensor in of]) for place, of in by_group.items()]
        names = [[self._names.get(one, "") for one, _ in of] for of in by_group.values()] if self._names else ()
        return stand_in(self._inner, groups, copies, names), copies

    def _note(self, changes: Iterable[Change]) -> None:
        """By place, and not all at once: the program may have changed the rest meanwhile."""
        self._noted.update({(id(one.holder), one.key): one for one in changes})

    def _adopt(self, number: int) -> None:
        if state := self.state_of(number):
            in_chunks = self._in_chunks(number, state, self._data.tensor_to_update(number).shape)
            state.update(self._data.adopt(number, in_chunks, self._adopted[number]))

    def _in_chunks(self, number: int, state: Mapping[str, Any], shape: torch.Size) -> dict[str, torch.Tensor]:
        """Of what the optimizer keeps for a tensor, or for a piece of it, what lies in chunks.

        It has that shape. So may a count of steps have, if the tensor has one element; then it is what the optimizer
        would keep in a matrix's shape, too.
        """
        group, is_one = self._data.tensors[number].group, self._data.views[number].numel() == 1
        keys = self._keys[group] if is_one and group is not None else None
        return {
            key: value
            for key, value in state.items()
            if isinstance(value, torch.Tensor) and value.shape == shape and (keys is None or key in keys)
        }


def _as_wide(value: Any, parameter: torch.Tensor) -> Any:
    """What an optimizer has kept for a 16-bit parameter, for its master."""
    narrow = isinstance(value, torch.Tensor) and value.is_floating_point() and value.element_size() < 4
    return value.float() if narrow and value.shape == parameter.shape else value
