"""One module of the parts that stages hold of it: what is set in the one is set in its parts, which compute."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from torch_lms.stages.extra_state import KeepsExtraState
from torch_lms.stages.installation import KINDS, Container
from torch_lms.stages.own_modes import SetsModes

__all__ = ["merge", "tie_modules"]


class _Linked(dict[str, Any]):
    """What a module holds of one kind: an entry that is set or deleted is so in all dicts that have it as well."""

    def __init__(self, entries: Mapping[str, Any], others: Mapping[str, Sequence[dict[str, Any]]]) -> None:
        super().__init__(entries)
        self._others = others

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        for other in self._others.get(name, ()):
            other[name] = value

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        for other in self._others.get(name, ()):
            other.pop(name, None)

    def __reduce__(self) -> Any:
        return _Linked, (dict(self), self._others)


class _Merged(Container):
    """Stands for a module of the model that several stages may have parts of."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.train(parts[0].training)
        vars(self)["parts"] = list(parts)  # not registered: their names would not be the model's

    def train(self, mode: bool = True) -> _Merged:
        """Of the parts, too."""
        super().train(mode)
        for part in vars(self).get("parts", ()):
            part.train(mode)
        return self


def merge(into: nn.Module, parts: Sequence[nn.Module]) -> None:
    """Registers what the parts of a module hold in another.

    A module that several stages call becomes one, that of the first of them: flags and hooks are then of all calls.

    Args:
        into: the module, or the first part itself.
        parts: what stages hold of it, in the order of the stages; they must not be parts of each other.
    """
    children: dict[str, list[nn.Module]] = {}
    for part in parts:
        for name, child in part._modules.items():
            children.setdefault(name, []).extend([] if child is None else [child])
    made = {name: _one_of(given) for name, given in children.items()}
    for part in parts:
        for name, child in part._modules.items():
            if child is not None and not isinstance(child, Container):
                part._modules[name] = made[name]
    for kind in KINDS:
        entries = made if kind == "_modules" else {}
        others: dict[str, list[dict[str, Any]]] = {}
        for part in parts:
            for name, value in vars(part)[kind].items():
                entries.setdefault(name, value)
                if part is not into:
                    others.setdefault(name, []).append(vars(part)[kind])
        vars(into)[kind] = _Linked(entries, others)
    for part in parts:
        into._non_persistent_buffers_set |= part._non_persistent_buffers_set
        if isinstance(into, KeepsExtraState):
            into.share_extra_state(part)
        if isinstance(into, SetsModes):
            into.share_modes(part)


def tie_modules(into: nn.Module, twins: Iterable[Sequence[str]]) -> None:
    """Makes one module of what the model has under several names, if a stage runs it whole: what is set is set in all.

    Args:
        into: has what all stages hold.
        twins: the names of each such module.
    """
    for names in twins:
        places = [place for place in (_place_of(into, name) for name in names) if place is not None]
        whole = [held[leaf] for held, leaf in places if not isinstance(held[leaf], KeepsExtraState)]
        for held, leaf in places if whole else ():
            if isinstance(held[leaf], KeepsExtraState):  # that runs nothing; its stage keeps its own
                dict.__setitem__(held, leaf, whole[0])
            elif held[leaf] is not whole[0]:
                held[leaf] = whole[0]


def _place_of(module: nn.Module, name: str) -> tuple[dict[str, Any], str] | None:
    """What holds a module, and under which name; None where there is none."""
    *path, leaf = name.split(".")
    holder: nn.Module | None = module
    for part in path:
        holder = None if holder is None else holder._modules.get(part)
    return None if holder is None or holder._modules.get(leaf) is None else (holder._modules, leaf)


def _one_of(given: Sequence[nn.Module]) -> nn.Module | None:
    """One module of those that stages have under one name; a whole one holds all that its parts do."""
    distinct = list({id(module): module for module in given}.values())
    whole = next((module for module in distinct if not isinstance(module, Container)), None)
    containers = [module for module in distinct if isinstance(module, Container)]
    if whole is not None:
        if containers:
            merge(whole, [whole, *containers])
        return whole
    if not distinct:
        return None
    made = _Merged(distinct)
    merge(made, distinct)
    return made
