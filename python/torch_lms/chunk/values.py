"""What an optimizer keeps beside its state: copies that a step may write to, and what it has changed of them.

Note [What a step counts]
A step of a model in chunks is several of the given optimizer, one for each chunk, and an optimizer may count its steps:
in itself or in its groups, in numbers, tensors, dicts, lists, sets and data classes, one in the other. So each of these
steps works on copies of what was there before the first. What they change is noted, and holds when all have been made:
what each of them has counted counts once. What lies in a dict by tensor is that tensor's own, and is not copied, nor
are parameters and masters themselves, and things of other kinds (modules, functions, locks).
"""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from itertools import cycle, islice
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

__all__ = ["Change", "Copies", "stand_in", "step_without_hooks", "take_over"]

_BY_TENSOR = ("params", "param_names")  # of a group
_GONE = object()  # in place of a value
_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None)))  # most values are
_KNOWN = frozenset((dict, OrderedDict, defaultdict, list, set, deque))  # faster by their own method


@dataclass(frozen=True)
class Change:
    """What has become of a part of something: of a dict, list or set, or of a tensor as a whole.

    Attributes:
        holder: of the part.
        key: of a dict's value, a place in a list, an element of a set.
        value: that is there now.
    """

    holder: Any
    key: Any
    value: Any


@dataclass(frozen=True)
class _Copy:
    """Of `original`, as it was `before`: its parts, by key; of a tensor, its version."""

    original: Any
    copy: Any
    before: Any = None
    but: Sequence[Any] = ()


class Copies:
    """Copies of values and of all that is in them; what several share, their copies share.

    Not thread-safe.

    Args:
        shared: tensors that are not copied.
        with_generators: whether those of random numbers are copied, too. (One that all share draws no number twice.)
    """

    def __init__(self, shared: Container[Any] = (), *, with_generators: bool = False) -> None:
        self._shared = shared
        self._with_generators = with_generators
        self._made: dict[int, _Copy] = {}  # by the original's id

    def generators(self) -> list[torch.Generator]:
        """That have been copied."""
        return [one.copy for one in self._made.values() if isinstance(one.copy, torch.Generator)]

    def restore_generators(self) -> None:
        """Those that have been copied draw again what they were to draw then."""
        for one in self._made.values():
            if isinstance(one.copy, torch.Generator):
                one.original.set_state(one.copy.get_state())
            elif isinstance(one.copy, random.Random):
                one.original.setstate(one.copy.getstate())

    def of(self, value: Any, but: Sequence[str] = ()) -> Any:
        """A copy of a value, or itself if it is not of a kind that is copied.

        Args:
            value: to copy.
            but: keys of it whose values are left as they are, and may change.
        """
        if type(value) in _PLAIN:
            return value
        if id(value) in self._made:
            return self._made[id(value)].copy
        if isinstance(value, torch.Tensor):
            if not isinstance(value, nn.Parameter) and value not in self._shared:
                made = value.clone()
                self._made[id(value)] = _Copy(value, made, _version(made))
        elif isinstance(value, dict | list | set | deque):
            self._copy_parts(value, value.copy() if type(value) in _KNOWN else copy.copy(value), but)
        elif isinstance(value, tuple):
            parts = [self.of(part) for part in value]
            if any(part is not given for part, given in zip(parts, value, strict=True)):
                return tuple.__new__(type(value), parts)
        elif _is_data(value):
            data = copy.copy(value)
            self._made[id(value)] = _Copy(value, data)
            self._copy_parts(vars(value), vars(data))
        elif self._with_generators and isinstance(value, torch.Generator | random.Random):
            self._made[id(value)] = _Copy(value, copy.copy(value))
        return self._made[id(value)].copy if id(value) in self._made else value

    def _copy_parts(self, value: Any, made: Any, but: Sequence[str] = ()) -> None:
        self._made[id(value)] = _Copy(value, made)  # before its parts, of which one may be itself
        if not isinstance(value, set):
            for key, part in _parts(value).items():
                if type(part) not in _PLAIN and key not in but and not isinstance(key, torch.Tensor):
                    made[key] = self.of(part)
        self._made[id(value)] = _Copy(value, made, _parts(made), but)

    def changes(self) -> Iterator[Change]:
        """What has been changed of copies, as changes of what they are copies of."""
        originals = {id(one.copy): one.original for one in self._made.values()}
        for one in self._made.values():
            if isinstance(one.copy, torch.Tensor):
                if _version(one.copy) != one.before:
                    yield Change(one.original, None, one.copy)
            elif one.before is not None:
                now = _parts(one.copy)
                for key in {**one.before, **now}:
                    value = now.get(key, _GONE)
                    if key not in one.but and value is not one.before.get(key, _GONE):
                        yield Change(one.original, key, originals.get(id(value), value))


def stand_in(
    optimizer: Optimizer,
    groups: Sequence[tuple[dict[str, Any], Sequence[torch.Tensor]]],
    copies: Copies,
    names: Sequence[Sequence[str]] = (),
) -> Optimizer:
    """The optimizer, with the same state, as one of other tensors.

    Args:
        optimizer: nothing of it changes by what the other one does, but for its state.
        groups: of the optimizer, and the tensors that are in each.
        copies: makes the copies that it works on.
        names: of the tensors in each group, if the optimizer has names; its first ones if left out.
    """
    own = [copies.of(group, but=_BY_TENSOR) for group, _ in groups]  # first: it may have another way to them
    made: Optimizer = object.__new__(type(optimizer))
    made.__dict__ = copies.of(vars(optimizer), but=("param_groups", "state"))
    made.param_groups = own
    for place, (group, (_, tensors)) in enumerate(zip(own, groups, strict=True)):
        group["params"] = list(tensors)
        if given := group.get("param_names"):
            group["param_names"] = list(names[place] if names else islice(cycle(given), len(tensors)))
    return made


def step_without_hooks(optimizer: Optimizer) -> None:
    """The optimizer's own step; its hooks are for whole steps."""
    step: Any = type(optimizer).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)


def take_over(changes: Iterable[Change]) -> None:
    """What has been changed holds from now on."""
    for one in changes:
        holder, key, value = one.holder, one.key, one.value
        if isinstance(holder, torch.Tensor):
            holder.copy_(value)
        elif isinstance(holder, set):
            (holder.discard if value is _GONE else holder.add)(key)
        elif isinstance(holder, dict):
            if value is _GONE:
                holder.pop(key, None)
            else:
                holder[key] = value
        elif value is _GONE:  # all behind it are, too
            while len(holder) > key:
                holder.pop()
        elif key < len(holder):
            holder[key] = value
        else:
            holder.append(value)


def _is_data(value: object) -> bool:
    is_one = isinstance(value, SimpleNamespace) or is_dataclass(value)
    return is_one and hasattr(value, "__dict__") and not isinstance(value, type)


def _parts(value: Any) -> dict[Any, Any]:
    if isinstance(value, dict):
        return dict(value)
    return dict.fromkeys(value, True) if isinstance(value, set) else dict(enumerate(value))


def _version(value: torch.Tensor) -> int:
    return value._version if not value.is_inference() else 0
