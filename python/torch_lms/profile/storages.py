"""Names for storages, and the tensors inside of what a model takes and gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from torch_lms._torch_compat import named_parameters_with_ties, storage_bytes, storage_key, storage_weak_ref

__all__ = ["StorageNames", "dense_parts", "is_expanded", "ones_for", "tensor_bytes", "tensors_in"]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested lists, tuples, mappings and dataclasses, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with storages that a tensor is made of; of one that a transform of torch.func wraps, those inside."""
    functorch: Any = getattr(torch._C, "_functorch", None)
    while hasattr(functorch, "get_unwrapped") and functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    if tensor.layout == torch.strided:
        return [tensor]
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout == torch.sparse_csr:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return []


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether it repeats elements that its storage has once."""
    if tensor.layout != torch.strided:
        return False
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def ones_for(tensor: torch.Tensor) -> torch.Tensor:
    """A gradient of a tensor: ones; of a sparse one, which has no such, its own values, and no larger than it is."""
    if tensor.layout != torch.strided:
        return tensor.detach().clone()
    if is_expanded(tensor):
        return torch.ones((), dtype=tensor.dtype, device=tensor.device).expand_as(tensor)
    return torch.ones_like(tensor)


def tensor_bytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor's own elements, as they would be sent."""
    return sum(part.numel() * part.element_size() for part in dense_parts(tensor))


class StorageNames:
    """Gives each storage one name for as long as this object lives.

    A storage is named after the node where it is seen first. Weak references keep its key from being given to another
    storage after it is freed, so that two storages never share a name although their bytes may share an address.

    Args:
        model: its parameters and buffers are known by their own names.
    """

    def __init__(self, model: nn.Module) -> None:
        self.bytes: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._counts: dict[str, int] = {}
        self._refs: list[Any] = []
        self._model: dict[int, str] = {}
        for name, tensor in [*named_parameters_with_ties(model), *model.named_buffers()]:
            for part in dense_parts(tensor):
                self._model.setdefault(storage_key(part), name)

    def model_names(self, tensor: torch.Tensor) -> list[str]:
        """The parameters or buffers that a tensor is, or is a view of."""
        return [self._model[key] for key in map(storage_key, dense_parts(tensor)) if key in self._model]

    def names(self, tensor: torch.Tensor, node: str) -> list[str]:
        """Names of the storages behind a tensor, parameters and buffers left out.

        Args:
            tensor: most have one storage, sparse ones several.
            node: what a storage is named after if it is new.
        """
        return [self._name(part, node) for part in dense_parts(tensor) if storage_key(part) not in self._model]

    def alias(self, tensor: torch.Tensor, name: str) -> None:
        """Gives a storage the name of another: a copy that stands for it."""
        for part in dense_parts(tensor):
            self._refs.append(storage_weak_ref(part))
            self._names[storage_key(part)] = name

    def alias_model(self, tensor: torch.Tensor, name: str) -> None:
        """Makes a storage known as a copy of a parameter or buffer."""
        for part in dense_parts(tensor):
            self._refs.append(storage_weak_ref(part))
            self._model[storage_key(part)] = name

    def _name(self, tensor: torch.Tensor, node: str) -> str:
        key = storage_key(tensor)
        if key not in self._names:
            self._refs.append(storage_weak_ref(tensor))
            count = self._counts.get(node, 0)
            while (name := f"{node}.{count}" if count else node) in self.bytes:
                count += 1
            self._counts[node] = count
            self._names[key] = name
            self.bytes[name] = storage_bytes(tensor)
        return self._names[key]
