"""Runs of the user's model that leave it as it was, and whose errors name the user's line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from torch_lms._torch_compat import storage_key
from torch_lms.errors import ProfileError
from torch_lms.profile.arguments import Sample
from torch_lms.profile.attributes import Attributes, plain_tensors
from torch_lms.profile.generators import generators_kept, generators_of
from torch_lms.profile.source_lines import blame, first_line

__all__ = [
    "NodeError",
    "contents_kept",
    "forget_gradients",
    "is_lack_of_memory",
    "placed_on",
    "preserved",
    "run_or_explain",
    "storages_of",
]


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
def preserved(model: nn.Module, sample: Sample) -> Iterator[None]:
    """Puts back buffers, attributes, gradients and the states of random numbers.

    Args:
        model: that runs; parameters that it writes to are not put back.
        sample: what it runs with, and may write to; tensors that it cannot write to are left alone.
    """
    attributes = Attributes(model)
    kept = [*model.buffers(), *(tensor for tensor in plain_tensors(model).values() if tensor.is_leaf)]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    devices = sorted({tensor.device.index or 0 for tensor in _tensors(model) if tensor.is_cuda})
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=devices))
            stack.enter_context(generators_kept(generators_of(model, (sample.args, dict(sample.kwargs)))))
            stack.enter_context(contents_kept(kept))
            stack.enter_context(_unwritten(sample.tensors))
            yield
    finally:
        attributes.put_back()
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
