"""What cannot be held in chunks, refused before anything has changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from torch_lms.chunk.model_data import ModelTensor
from torch_lms.chunk.optimizer import ChunkedOptimizer
from torch_lms.errors import ChunkError

__all__ = ["check_model", "check_options", "note_in_chunks"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)

_in_chunks = WeakIdKeyDictionary()  # parameters; used as a set


def note_in_chunks(tensors: Iterable[ModelTensor]) -> None:
    """These are in chunks from now on."""
    for one in tensors:
        _in_chunks[one.parameter] = True


def check_options(dtype: torch.dtype, update_on: str, *, step_in_backward: bool) -> None:
    """Refuses what the words of `torch_lms.chunked` cannot be.

    Raises:
        ChunkError: if so.
    """
    if update_on not in ("device", "host"):
        raise ChunkError(f"expected update_on to be 'device' or 'host', found {update_on!r}; pass one of these")
    if dtype not in (torch.bfloat16, torch.float16):
        raise ChunkError(f"expected dtype to be torch.bfloat16 or torch.float16, found {dtype}; pass one of these")
    if dtype == torch.float16 and step_in_backward:
        raise ChunkError(
            "expected step_in_backward with torch.bfloat16, found torch.float16, whose gradients are scaled, and may "
            "have to be skipped; use bfloat16, or leave step_in_backward out"
        )


def check_model(model: nn.Module, optimizer: Optimizer, tensors: Sequence[ModelTensor]) -> None:
    """Refuses a model or an optimizer that cannot be in chunks.

    Raises:
        ChunkError: if so.
    """
    if isinstance(optimizer, LBFGS | ChunkedOptimizer):
        raise ChunkError(
            "expected an optimizer that treats each parameter alone, and is not in chunks yet, found "
            f"{type(optimizer).__name__}; use another, such as torch.optim.AdamW"
        )
    devices = sorted({str(one.parameter.device) for one in tensors})
    if len(devices) != 1 or devices == ["meta"]:
        raise ChunkError(
            f"expected a model on one device, found its parameters on {' and '.join(devices)}; move it to the device "
            "that it is to run on"
        )
    for one in tensors:
        _check_parameter(one)
    for name, module in model.named_modules():
        _check_module(name or "the model", module)


def _check_parameter(one: ModelTensor) -> None:
    if one.parameter in _in_chunks:
        raise ChunkError(
            f"expected parameters that are in no chunks yet, found {one.name}, which is; call torch_lms.chunked once, "
            "with one optimizer of all parameters, or for parts of the model that share none"
        )
    if one.parameter.dtype not in _FLOATS or one.parameter.layout is not torch.strided:
        raise ChunkError(
            f"expected dense parameters of 32 or 16 bits, found {one.name}, {one.parameter.layout} of "
            f"{one.parameter.dtype}; convert it, or leave this part of the model out"
        )
    if one.parameter.grad is not None:
        raise ChunkError(f"expected no gradients yet, found one of {one.name}; call optimizer.zero_grad() first")


def _check_module(name: str, module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_orig_mod"):
        raise ChunkError(
            f"expected modules that are not compiled yet, found {name}, a {type(module).__name__}; compile it after "
            "torch_lms.chunked"
        )
    if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
        raise ChunkError(f"expected dense gradients, found {name} with sparse=True; build it with sparse=False")
