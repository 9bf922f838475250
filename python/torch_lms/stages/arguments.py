"""The arguments of a model, and which of them its graph still has.

A trace keeps tensors as arguments. Everything else that the model was traced with is a constant of the graph: it may be
given again, but not as something else.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_lms._torch_compat import tree_flatten
from torch_lms.errors import PartitionError

__all__ = ["Argument", "bind_arguments", "find_arguments"]


@dataclass(frozen=True)
class Argument:
    """One argument of the model.

    Attributes:
        name: in the model's ``forward``.
        required: whether the graph needs a value for it.
        default: used where it is not given.
        constant: whether the graph holds for the default only.
        parts: for a nest of tensors, the names of the graph's arguments that they are.
    """

    name: str
    required: bool = True
    default: Any = None
    constant: bool = False
    parts: tuple[str, ...] = ()

    def values(self, value: Any) -> dict[str, Any]:
        """The graph's arguments from that of the model.

        Raises:
            PartitionError: if it is not as it was when the model was traced.
        """
        if self.constant:
            if value is self.default or bool(value == self.default):
                return {}
            raise PartitionError(
                f"expected {self.name}={self.default!r}, which is a constant of the graph, found {value!r}; "
                "trace the model again for this value"
            )
        if not self.parts:
            return {self.name: value}
        tensors = [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]
        if len(tensors) != len(self.parts):
            raise PartitionError(
                f"expected {len(self.parts)} tensors in {self.name!r}, as when it was traced, found {len(tensors)}; "
                "give it the same structure"
            )
        return dict(zip(self.parts, tensors, strict=False))


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
    sample = getattr(traced, "sample", None)
    if sample is None:
        return plain
    bound = inspect.signature(traced.model.forward).bind(*sample.args, **sample.kwargs)
    found = [_argument(name, value, placeholders) for name, value in bound.arguments.items()]
    covered = {part for argument in found for part in (argument.name, *argument.parts) if not argument.constant}
    # What a variadic argument became, or what was renamed, is there under the graph's own name.
    return (
        *(argument for argument in found if argument is not None),
        *(own for own in plain if own.name not in covered),
    )


def _argument(name: str, value: Any, placeholders: Mapping[str, fx.Node]) -> Argument:
    if name in placeholders:
        return Argument(name)
    count = sum(isinstance(leaf, torch.Tensor) for leaf in tree_flatten(value)[0])
    parts = tuple(f"{name}_{index}" for index in range(count))
    if parts and all(part in placeholders for part in parts):
        return Argument(name, parts=parts)
    return Argument(name, required=False, default=value, constant=True)


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
    if len(args) > len(names):
        raise PartitionError(
            f"expected at most {len(names)} arguments ({', '.join(names)}), found {len(args)}; leave some out"
        )
    given = dict(zip(names, args, strict=False))
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
