"""The arguments of a model, and which of them its graph still has.

A trace keeps tensors as arguments. Everything else that the model was traced with is a constant of the graph: it may be
given again, but not as something else.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from torch_lms._torch_compat import tree_flatten
from torch_lms.errors import PartitionError
from torch_lms.profile.sameness import is_same

__all__ = ["Argument", "bind_arguments", "find_arguments"]


@dataclass(frozen=True)
class _Tensors:
    """Stands for a tensor in a nest, or for an object with tensors: the graph's arguments that they are."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Argument:
    """One argument of the model.

    Attributes:
        name: in the model's ``forward``.
        required: whether the graph needs a value for it.
        default: used where it is not given.
        constant: whether the graph holds for the default only.
        parts: for a nest of tensors, the names of the graph's arguments that they are.
        nest: what it was when the model was traced, with the names in place of the tensors; None where any nest does.
        by_name: whether it cannot be given by place.
    """

    name: str
    required: bool = True
    default: Any = None
    constant: bool = False
    parts: tuple[str, ...] = ()
    nest: Any = None
    by_name: bool = False

    def values(self, value: Any) -> dict[str, Any]:
        """The graph's arguments from that of the model.

        Raises:
            PartitionError: if it is not as it was when the model was traced.
        """
        if self.constant:
            _check_constant(self.name, self.default, value)
            return {}
        if not self.parts:
            return {self.name: value}
        nest = self.nest if self.nest is not None else _Tensors(self.parts)
        return dict(_match(self.name, nest, value))


def _check_constant(name: str, expected: Any, found: Any) -> None:
    if not is_same(expected, found):
        raise PartitionError(
            f"expected {name}={expected!r}, which is a constant of the graph, found {_shown(found)}; "
            "trace the model again for this value"
        )


def _shown(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def _match(path: str, nest: Any, value: Any) -> Iterator[tuple[str, Any]]:
    """The tensors of a nest under the graph's names, whatever order a dict has."""
    if isinstance(nest, _Tensors):
        tensors = [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]
        if len(tensors) != len(nest.names):
            raise PartitionError(
                f"expected {len(nest.names)} tensors in {path!r}, as when it was traced, found {len(tensors)}; "
                "give it the same structure"
            )
        yield from zip(nest.names, tensors, strict=True)
    elif isinstance(nest, dict):
        given = set(value) if isinstance(value, Mapping) else set()
        if given != set(nest):
            raise PartitionError(
                f"expected {path!r} with {sorted(map(str, nest))}, as when it was traced, found "
                f"{sorted(map(str, given)) or type(value).__name__}; give it the same structure"
            )
        for key, item in nest.items():
            yield from _match(f"{path}[{key!r}]", item, value[key])
    elif isinstance(nest, (list, tuple)):
        if not isinstance(value, (list, tuple)) or len(value) != len(nest):
            found = f"{len(value)}" if isinstance(value, (list, tuple)) else type(value).__name__
            raise PartitionError(
                f"expected {path!r} with {len(nest)} items, as when it was traced, found {found}; "
                "give it the same structure"
            )
        for index, item in enumerate(nest):
            yield from _match(f"{path}[{index}]", item, value[index])
    else:
        _check_constant(path, nest, value)


def find_arguments(graph: fx.Graph, traced: Any) -> tuple[Argument, ...]:
    """The model's arguments in the order of its ``forward``.

    Raises:
        PartitionError: if the graph takes starred arguments.
    """
    placeholders = {str(node.target): node for node in graph.nodes if node.op == "placeholder"}
    starred = [name for name in placeholders if name.startswith("*")]
    if starred:
        raise PartitionError(
            f"expected arguments with names, found {starred}; give the model's forward named arguments"
        )
    plain = tuple(Argument(name, not node.args, *node.args) for name, node in placeholders.items())
    if getattr(traced, "sample", None) is None:
        return plain
    found = list(_arguments(traced, placeholders))
    covered = {part for argument in found for part in (argument.name, *argument.parts) if not argument.constant}
    # What was renamed is there under the graph's own name.
    return (*found, *(own for own in plain if own.name not in covered))


def _arguments(traced: Any, placeholders: Mapping[str, fx.Node]) -> Iterator[Argument]:
    """Those that were given when the model was traced, and defaults, which the graph holds for as well."""
    parameters = inspect.signature(traced.model.forward).parameters
    bound = inspect.signature(traced.model.forward).bind(*traced.sample.args, **traced.sample.kwargs).arguments
    for name, parameter in parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            for index, item in enumerate(bound.get(name, ())):
                yield _argument(f"{name}_{index}", item, placeholders)
        elif parameter.kind is parameter.VAR_KEYWORD:
            for key, item in bound.get(name, {}).items():
                yield replace(_argument(key, item, placeholders), by_name=True)
        else:
            by_name = parameter.kind is parameter.KEYWORD_ONLY
            value = bound.get(name, parameter.default)
            yield replace(_argument(name, value, placeholders), by_name=by_name)


def _argument(name: str, value: Any, placeholders: Mapping[str, fx.Node]) -> Argument:
    if name in placeholders:
        return Argument(name)
    left = iter(range(len(placeholders)))
    nest = _nest(name, value, left)
    count = next(left, len(placeholders))
    parts = tuple(f"{name}_{index}" for index in range(count))
    if parts and all(part in placeholders for part in parts):
        return Argument(name, parts=parts, nest=nest)
    return Argument(name, required=False, default=value, constant=True)


def _nest(name: str, value: Any, left: Iterator[int]) -> Any:
    """A nest with the graph's names in place of its tensors, which are counted as the tracer counts them."""
    if isinstance(value, torch.Tensor):
        return _Tensors((f"{name}_{next(left)}",))
    if type(value) is dict:
        return {key: _nest(name, item, left) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_nest(name, item, left) for item in value]
    count = sum(isinstance(leaf, torch.Tensor) for leaf in tree_flatten(value)[0])
    return _Tensors(tuple(f"{name}_{next(left)}" for _ in range(count))) if count else value


def bind_arguments(
    arguments: Sequence[Argument], args: Sequence[Any], kwargs: Mapping[str, Any], *, partial: bool = False
) -> dict[str, Any]:
    """Gives each argument of the graph its value.

    Args:
        arguments: of the model.
        args: by place.
        kwargs: by name.
        partial: whether required ones may be missing.

    Raises:
        PartitionError: for too many, unknown, doubled or missing arguments, or another value of a constant.
    """
    names = [argument.name for argument in arguments]
    places = [argument.name for argument in arguments if not argument.by_name]
    if len(args) > len(places):
        raise PartitionError(
            f"expected at most {len(places)} arguments by place ({', '.join(places)}), found {len(args)}; leave some "
            "out, or give them by name"
        )
    given = dict(zip(places, args, strict=False))
    for name, value in kwargs.items():
        if name not in names:
            raise PartitionError(
                f"expected arguments among {', '.join(names)}, found {name!r}; the model was traced without it"
            )
        if name in given:
            raise PartitionError(f"expected each argument once, found {name!r} twice; give it by place or by name")
        given[name] = value
    values: dict[str, Any] = {}
    for argument in arguments:
        if argument.name in given:
            values.update(argument.values(given[argument.name]))
        elif not argument.required and not argument.constant:
            values[argument.name] = argument.default
        elif argument.required and not partial:
            raise PartitionError(f"expected a value for {argument.name!r}, found none; give all of {', '.join(names)}")
    return values
