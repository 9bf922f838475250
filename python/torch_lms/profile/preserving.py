"""Runs of the user's model that leave it as it was, and whose errors name the user's line."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torch_lms._torch_compat import storage_key
from torch_lms.errors import ProfileError
from torch_lms.profile.arguments import Sample
from torch_lms.profile.source_lines import blame, first_line

__all__ = [
    "Attributes",
    "NodeError",
    "contents_kept",
    "forget_gradients",
    "is_lack_of_memory",
    "placed_on",
    "plain_tensors",
    "preserved",
    "refuse_assigned",
    "run_or_explain",
    "storages_of",
]

_MISSING = object()


class Attributes:
    """What the modules of a model have as attributes now, to find what its forward assigns, and to undo it."""

    def __init__(self, model: nn.Module) -> None:
        self._held = [
            (f"{path}.{name}" if path else name, place, name, value)
            for path, module in model.named_modules()
            for place in _places(module)
            for name, value in place.items()
        ]
        self._places = [(path, place) for path, module in model.named_modules() for place in _places(module)]
        self._known = {(id(place), name) for _, place, name, _ in self._held}

    def put_back(self, keep: Collection[str] = ()) -> frozenset[str]:
        """Puts all of it back.

        Args:
            keep: paths of what may stay, where there was nothing.

        Returns:
            The paths of the tensors in whose place there was something else.
        """
        replaced = set()
        for path, place, name, value in self._held:
            if place.get(name, _MISSING) is not value:
                place[name] = value
                if isinstance(value, torch.Tensor):
                    replaced.add(path)
        for path, place in self._places:
            for name in [name for name in place if (id(place), name) not in self._known]:
                if (f"{path}.{name}" if path else name) not in keep:
                    del place[name]
        return frozenset(replaced)


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


def _places(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return vars(module), module._parameters, module._buffers


def plain_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Attributes that are tensors and neither parameters nor buffers, by path."""
    return {
        f"{path}.{name}" if path else name: value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


def storages_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The keys of the storages of tensors that have one and values in it."""
    return {storage_key(tensor) for tensor in tensors if tensor.layout == torch.strided and not tensor.is_meta}


@contextmanager
def contents_kept(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Puts back what tensors hold."""
    before = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)


@contextmanager
def preserved(model: nn.Module, sample: Iterable[torch.Tensor]) -> Iterator[None]:
    """Puts back buffers, tensors that are plain attributes, gradients and the state of random numbers.

    Args:
        model: that runs.
        sample: what it runs with, and may write to; tensors that it cannot write to are left alone.
    """
    kept = [*model.buffers(), *(tensor for tensor in plain_tensors(model).values() if tensor.is_leaf)]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    devices = sorted({tensor.device.index or 0 for tensor in _tensors(model) if tensor.is_cuda})
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng(devices=devices), contents_kept(kept), _unwritten(sample):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextmanager
def _unwritten(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Puts back what tensors hold that are written to; the others may be part of somebody's graph."""
    before = [(tensor, tensor._version, tensor.detach().clone()) for tensor in tensors if _may_be_written(tensor)]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, version, value in before:
                if tensor._version != version:
                    tensor.copy_(value)


def _may_be_written(tensor: torch.Tensor) -> bool:
    """In place, outside of inference mode: no element is at the place of another."""
    if tensor.layout != torch.strided or tensor.is_inference() or getattr(tensor, "is_nested", False):
        return False
    return all(stride != 0 or size <= 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def forget_gradients(module: nn.Module) -> None:
    """Of all its parameters, whatever its own ``zero_grad`` does."""
    for parameter in module.parameters():
        parameter.grad = None


class NodeError(Exception):
    """A node of a graph has failed; its cause is what was raised.

    Attributes:
        place: the node, its module, and the user's line if it is known.
    """

    def __init__(self, place: str) -> None:
        super().__init__(place)
        self.place = place


def run_or_explain(model: nn.Module, sample: Sample, run: Callable[[], Any]) -> Any:
    """Runs something of the user's.

    Raises:
        ProfileError: if it fails; names the user's line and the sample's shapes.
    """
    try:
        return run()
    except ProfileError:
        raise
    except Exception as raised:
        error = raised.__cause__ if isinstance(raised, NodeError) and raised.__cause__ else raised
        place = blame(error) or (raised.place if isinstance(raised, NodeError) else "")
        raise ProfileError(
            f"expected {type(model).__name__} to run with the sample ({sample.describe()}), found "
            f"{first_line(error)}{f' at {place}' if place else ''}; {_advice(error)}"
        ) from error


def is_lack_of_memory(error: BaseException) -> bool:
    """Whether an error says so: of PyTorch's allocator, or of a library of CUDA that found none for itself."""
    return re.search("out of memory|ALLOC(ATION)?_FAILED", str(error)) is not None


def _advice(error: BaseException) -> str:
    if is_lack_of_memory(error):
        return "profile it piece by piece: ProfileConfig(pieces=True), or with a smaller sample"
    if type(error).__name__.startswith("DataDependent"):
        return "what it does depends on values, so it must run whole: leave pieces and rates out"
    if isinstance(error, NotImplementedError):
        return "this PyTorch has no such op on this device: use another device, or a newer PyTorch"
    return "pass a sample that the model itself runs with"


@contextmanager
def placed_on(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Moves a model to a device, and puts its own tensors back afterwards."""
    own = [(tensor, tensor.data) for tensor in _tensors(model)]
    try:
        for tensor, data in own:
            tensor.data = data.to(device)
        yield
    finally:
        for tensor, data in own:
            tensor.data = data


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()
