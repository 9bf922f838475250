"""The attributes of a model's modules: found as they are, and put back after a forward that assigns others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn

from torch_lms.errors import ProfileError
from torch_lms.profile.sameness import is_same

__all__ = ["Attributes", "Change", "plain_tensors", "refuse_assigned"]

_MISSING = object()
_PLAIN = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device)
_COLLECTIONS = (list, dict, set, deque)


@dataclass(frozen=True)
class Change:
    """What a forward has made of a plain attribute.

    Attributes:
        module: the path of the module that has it.
        name: of the attribute.
        make: makes the same change.
    """

    module: str
    name: str
    make: Callable[[], None]


class Attributes:
    """What the modules of a model have as attributes now, to find what its forward assigns, and to undo it.

    What lists, dicts, sets and deques among them hold is noted as well, though not what those inside of them hold.

    Attributes:
        changed: what the last `put_back` has undone of numbers, text and flags, such as a count of calls.
    """

    def __init__(self, model: nn.Module) -> None:
        self.changed: list[Change] = []
        self._places = [(path, place) for path, module in model.named_modules() for place in _places(module)]
        self._held = [
            (f"{path}.{name}" if path else name, place, name, value)
            for path, place in self._places
            for name, value in place.items()
        ]
        self._known = {(id(place), name) for _, place, name, _ in self._held}
        own = {id(place) for _, place in self._places}
        found = {id(value): value for *_, value in self._held if isinstance(value, _COLLECTIONS)}
        self._collections = [(value, _items_of(value)) for key, value in found.items() if key not in own]

    def put_back(self, keep: Collection[str] = ()) -> frozenset[str]:
        """Puts all of it back.

        Args:
            keep: paths of what may stay, where there was nothing.

        Returns:
            The paths of the tensors in whose place there was something else.
        """
        replaced = set()
        self.changed = list(self._changes())
        for path, place, name, value in self._held:
            if place.get(name, _MISSING) is not value:
                place[name] = value
                if isinstance(value, torch.Tensor):
                    replaced.add(path)
        for path, place in self._places:
            for name in [name for name in place if (id(place), name) not in self._known]:
                if (f"{path}.{name}" if path else name) not in keep:
                    del place[name]
        for collection, items in self._collections:
            if not _are_same(_items_of(collection), items):
                _refill(collection, items)
        return frozenset(replaced)

    def _changes(self) -> Iterator[Change]:
        """Of plain values; all else would be of the run that has ended."""
        before = {(id(place), name): value for _, place, name, value in self._held}
        for path, place in self._places:
            for name, value in place.items():
                if _is_plain(value) and not is_same(value, before.get((id(place), name), _MISSING)):
                    yield Change(path, name, partial(place.__setitem__, name, value))
        for collection, items in self._collections:
            found = _items_of(collection)
            if all(map(_is_plain, found)) and not is_same(found, items):
                path, name = next((path, name) for path, _, name, value in self._held if value is collection)
                yield Change(path.rpartition(".")[0], name, partial(_refill, collection, found))


def refuse_assigned(names: Collection[str]) -> None:
    """Says that a graph has no assignments to attributes.

    Raises:
        ProfileError: if there are names of any that were assigned.
    """
    if names:
        raise ProfileError(
            f"expected a forward that changes its tensors in place, found one that assigns others to {sorted(names)}; "
            "write to them, such as by copy_"
        )


def plain_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Attributes that are tensors and neither parameters nor buffers, by path."""
    return {
        f"{path}.{name}" if path else name: value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


def _places(module: nn.Module) -> tuple[dict[str, Any], ...]:
    if isinstance(module, torch.jit.ScriptModule):  # it shows what it has, and Python changes none of it
        return (vars(module),)
    return vars(module), module._parameters, module._buffers


def _items_of(collection: Any) -> list[Any]:
    """What it holds; of a dict keys and values, one after the other."""
    if isinstance(collection, dict):
        return [*collection.keys(), *collection.values()]
    return list(collection)


def _are_same(found: list[Any], items: list[Any]) -> bool:
    return len(found) == len(items) and all(one is other for one, other in zip(found, items, strict=True))


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (type(value) is tuple and all(map(_is_plain, value)))


def _refill(collection: Any, items: Iterable[Any]) -> None:
    collection.clear()
    if isinstance(collection, dict):
        held = list(items)
        collection.update(zip(held[: len(held) // 2], held[len(held) // 2 :], strict=True))
    elif isinstance(collection, set):
        collection.update(items)
    else:
        collection.extend(items)
