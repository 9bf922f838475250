"""Runs of the user's model that leave it as it was, and whose errors name the user's line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torch_lms.errors import ProfileError
from torch_lms.profile.arguments import Sample
from torch_lms.profile.source_lines import blame, first_line

__all__ = ["NodeError", "placed_on", "preserved", "run_or_explain"]


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Puts back buffers, gradients and the state of random numbers."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    devices = sorted({tensor.device.index or 0 for tensor in _tensors(model) if tensor.is_cuda})
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient


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


def _advice(error: BaseException) -> str:
    if "out of memory" in str(error):
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
