"""What a model's own `train` and `eval` do beside setting the mode of all modules.

Note [A model's own train]: stages hold a module that they opened as a container, whose class is not the module's: its
`train` is not there to be called. So what it does is tried when the model is cut, on a copy of the model whose tensors
have no values. If it only leaves modules in other modes, such as norms that stay in evaluation, the container does so
as well. If it does more (sets another attribute, or computes), the stages are for the one mode that they were cut in.
"""

from __future__ import annotations

import copy
import copyreg
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from torch_lms._torch_compat import function_mode

__all__ = ["OwnModes", "SetsModes", "find_own_modes"]

_SET = "_modes_that_train_sets"
_REQUIRES: Any = torch.Tensor.requires_grad
_HARMLESS = (_REQUIRES.__get__, _REQUIRES.__set__, torch.Tensor.requires_grad_)  # the flag is looked at afterwards
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_MOST_VALUES = 100_000  # a second
_KINDS = ("_parameters", "_buffers", "_modules")

Modes = Mapping[bool, Mapping[str, bool]]  # by what `train` is given: those of modules, by path, that become otherwise


@dataclass(frozen=True)
class OwnModes:
    """What is known of the modules of a model that have a `train` or an `eval` of their own.

    Attributes:
        of: by the path of each such module, and of the model if there are any, what its `train` leaves modules in.
        reason: why stages cannot do the same; empty if they can.
    """

    of: Mapping[str, Modes] = field(default_factory=dict)
    reason: str = ""


class _Unknown(Exception):  # noqa: N818  # no error: the stages are for one mode
    """Stages cannot do what a `train` does; the text says why."""


class SetsModes(nn.Module):
    """Stands for a module; see Note [A model's own train]."""

    def set_modes(self, modes: Modes) -> None:
        """Takes what the module's own `train` leaves modules in, by their paths from here."""
        vars(self)[_SET] = modes

    def share_modes(self, other: nn.Module) -> None:
        """Takes that of another part of the same module, if it has some."""
        if _SET in vars(other):
            vars(self)[_SET] = vars(other)[_SET]

    def train(self, mode: bool = True) -> Any:
        """Sets the mode of all modules, as the module itself would."""
        super().train(mode)
        modes = vars(self).get(_SET, {}).get(bool(mode), {})
        for path, module in self.named_modules(remove_duplicate=False) if modes else ():
            module.training = modes.get(path, module.training)
        return self


def find_own_modes(model: nn.Module, whole: Iterable[nn.Module]) -> OwnModes:
    """Tries what the `train` of modules does; nothing of the model changes.

    Args:
        model: that is cut.
        whole: modules that stages hold whole, and whose own `train` they call.
    """
    kept = {id(part) for one in whole for part in one.modules()}
    own = [path for path, module in model.named_modules() if _has_own(module) and id(module) not in kept]
    if not own:
        return OwnModes()
    paths = list(dict.fromkeys(["", *own]))
    try:
        return OwnModes(_tried(model, paths))
    except _Unknown as error:
        reason = str(error)
    except Exception as error:  # of a copy, or of a `train` that wants what the copy does not have
        reason = f"cannot be tried on a copy ({type(error).__name__}: {error})"
    names = " or ".join(type(model.get_submodule(path)).__name__ for path in own[:3])
    return OwnModes({path: {} for path in paths}, f"train() or eval() of {names} {reason}")


def _has_own(module: nn.Module) -> bool:
    return any(
        name in vars(module) or getattr(type(module), name) is not getattr(nn.Module, name)
        for name in ("train", "eval")
    )


def _tried(model: nn.Module, paths: Sequence[str]) -> dict[str, Modes]:
    tried = copy.deepcopy(model, _without_values(model))
    with torch.set_grad_enabled(torch.is_grad_enabled()), torch.random.fork_rng(devices=[]):  # the program's to set
        return _tried_on(tried, paths)


def _tried_on(tried: nn.Module, paths: Sequence[str]) -> dict[str, Modes]:
    before = _values(tried)
    found: dict[str, dict[bool, dict[str, bool]]] = {path: {} for path in paths}
    calls: list[str] = []
    for mode in (not tried.training, tried.training):
        with function_mode(partial(_noted, calls)):
            for path in paths:
                found[path][mode] = _modes_after(tried.get_submodule(path), mode)
        after = _values(tried)
        for path in {**after, **before}:
            if path not in before or path not in after or before[path][0] != after[path][0]:
                raise _Unknown(f"changes {path!r}")
    if calls:
        raise _Unknown(f"computes, by {calls[0]}")
    return {path: modes for path, modes in found.items() if any(modes.values())}


def _modes_after(part: nn.Module, mode: bool) -> dict[str, bool]:
    """The modes that `train` leaves a copy's modules in, where they become otherwise."""

    def others() -> dict[str, bool]:
        return {
            path: one.training for path, one in part.named_modules(remove_duplicate=False) if one.training is not mode
        }

    part.train(mode)
    found = others()
    if not mode:
        part.eval()
        if others() != found:
            raise _Unknown("does otherwise in eval() than in train(False)")
    return found


def _noted(calls: list[str], function: Any, args: Any, kwargs: Any) -> Any:
    if function not in _HARMLESS:
        calls.append(getattr(function, "__qualname__", str(function)))
    return function(*args, **kwargs)


def _without_values(model: nn.Module) -> dict[int, Any]:
    """Stands for the model's tensors in a copy, wherever it keeps them."""
    made: dict[int, Any] = {}
    for _, one in _values(model).values():
        if type(one) in (torch.Tensor, nn.Parameter) and id(one) not in made:
            like = torch.empty_like(one.detach(), device="meta")
            made[id(one)] = (
                nn.Parameter(like, one.requires_grad)
                if isinstance(one, nn.Parameter)
                else like.requires_grad_(one.requires_grad)
            )
    return made


def _values(model: nn.Module) -> dict[str, tuple[Any, Any]]:
    """All that can be reached from a model, but modes: by path what tells it from another, and what keeps it alive."""
    found: dict[str, tuple[Any, Any]] = {}
    seen: set[int] = set()
    left: list[tuple[str, Any]] = [("", model)]
    while left:
        path, value = left.pop()
        if len(found) == _MOST_VALUES:
            raise _Unknown(f"cannot be tried: the model holds more than {_MOST_VALUES} values, such as in a vocabulary")
        found[path] = _told_by(value), value
        if id(value) not in seen and not isinstance(value, torch.Tensor):
            seen.add(id(value))
            left += ((f"{path}.{name}" if path else name, held) for name, held in _held_by(value))
    return found


def _told_by(value: Any) -> Any:
    if value is None or isinstance(value, int | float | complex | str | bytes):
        return type(value), repr(value)
    if isinstance(value, torch.Tensor):
        return id(value), value._version, value.requires_grad
    if isinstance(value, set | frozenset):
        return id(value), frozenset(map(repr, value))
    return id(value)


def _held_by(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(name), held) for name, held in value.items())
    elif isinstance(value, list | tuple | deque):
        yield from ((str(place), held) for place, held in enumerate(value))
    if isinstance(value, _OPAQUE):
        return
    for name in copyreg._slotnames(type(value)):  # type: ignore[attr-defined]  # what a copy has of it
        if hasattr(value, name):
            yield name, getattr(value, name)
    for name, held in getattr(value, "__dict__", {}).items():
        if not isinstance(value, nn.Module):
            yield name, held
        elif name in _KINDS:
            yield from held.items()
        elif name != "training":
            yield name, held
