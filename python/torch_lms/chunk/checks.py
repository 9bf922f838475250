"""What cannot be held in chunks, refused before anything has changed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from torch_lms.chunk.model_data import ModelTensor
from torch_lms.chunk.optimizer import ChunkedOptimizer
from torch_lms.chunk.ranks import Ranks
from torch_lms.chunk.trials import (
    moves_what_it_is_given,
    takes_new_tensors,
    treats_each_element_alone,
    treats_each_tensor_alone,
)
from torch_lms.devices import find_device
from torch_lms.errors import ChunkError
from torch_lms.shared_bytes import pairs_that_share

__all__ = [
    "check_arguments",
    "check_model",
    "check_optimizer",
    "check_options",
    "check_ranks",
    "device_of",
    "note_in_chunks",
]

_NOT_TRIED = (
    "expected an optimizer that can be tried on two tensors, found that a step of {optimizer} raises {error}; make "
    "sure that it treats each parameter alone, since it gets those of one chunk at a time"
)

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)

_in_chunks = WeakIdKeyDictionary()  # parameters; used as a set


def note_in_chunks(tensors: Iterable[ModelTensor]) -> None:
    """These are in chunks from now on."""
    for one in tensors:
        _in_chunks[one.parameter] = True


def check_arguments(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuses what is no optimizer, or no model that can be looked at yet.

    Raises:
        ChunkError: if so.
    """
    if not isinstance(model, nn.Module):
        raise ChunkError(
            f"expected a model, a torch.nn.Module, found {_kind(model)}; pass the one that the optimizer is of"
        )
    if not isinstance(optimizer, Optimizer):
        raise ChunkError(
            f"expected an optimizer of the model's parameters, found {_kind(optimizer)}; make one of model.parameters()"
        )
    lazy = next((name for name, one in model.named_parameters() if is_lazy(one)), None)
    if lazy is not None:
        raise ChunkError(f"expected parameters with sizes, found {lazy} without; call the model once before")
    if torch.is_inference_mode_enabled():
        raise ChunkError("expected a model to train, found torch.inference_mode on; call chunked outside of it")


def check_optimizer(optimizer: Optimizer, device: torch.device, update_on: str) -> None:
    """Refuses one that does not treat each parameter alone: it would get those of one chunk at a time.

    Likewise, one that moves nothing, and one that knows tensors by their objects where each step has others. Of one
    that cannot be tried a warning says so: it may be right.

    Raises:
        ChunkError: if so.
    """
    for group in optimizer.param_groups:
        try:
            alone = treats_each_tensor_alone(optimizer, group, device)
        except Exception as error:
            found = _NOT_TRIED.format(optimizer=type(optimizer).__name__, error=f"{type(error).__name__}: {error}")
            warnings.warn(found, stacklevel=3)
            continue
        if not alone:
            raise ChunkError(
                f"expected an optimizer that treats each parameter alone, found {type(optimizer).__name__}, whose "
                "update of one depends on others, as by their norm, by one step size for all, or by its place among "
                "them; use another, with torch.nn.utils.clip_grad_norm_ before its step where that was the reason"
            )
        if not moves_what_it_is_given(optimizer, group, device):
            raise ChunkError(
                "expected an optimizer whose step changes the parameters of its groups, found "
                f"{type(optimizer).__name__}, which has changed nothing of a small matrix in four steps, as one does "
                "whose step is that of another optimizer inside of it; pass one that has its groups to itself"
            )
    if update_on == "stream" and not takes_new_tensors(optimizer, device):
        raise ChunkError(
            "expected an optimizer that keeps what it knows of a tensor in its state, since each step streams other "
            f"tensors, found {type(optimizer).__name__}, which knows them as objects; pass update_on='device' or 'host'"
        )


def check_options(
    dtype: torch.dtype, update_on: str, chunk_numel: int | None, *, reuse_gradients: bool, step_in_backward: bool
) -> None:
    """Refuses what the words of `torch_lms.chunked` cannot be.

    Raises:
        ChunkError: if so.
    """
    for name, value in (("reuse_gradients", reuse_gradients), ("step_in_backward", step_in_backward)):
        if not isinstance(value, bool):
            raise ChunkError(f"expected {name} to be True or False, found {value!r}; pass one of these")
    if not isinstance(update_on, str) or update_on not in ("auto", "device", "host", "stream"):
        raise ChunkError(
            f"expected update_on to be 'auto', 'device', 'host' or 'stream', found {update_on!r}; pass one of these"
        )
    if chunk_numel is not None and (isinstance(chunk_numel, bool) or not isinstance(chunk_numel, int)):
        raise ChunkError(
            f"expected chunk_numel to be a number of elements, found {chunk_numel!r}; pass an int, or leave it out"
        )
    if dtype not in (torch.bfloat16, torch.float16):
        raise ChunkError(f"expected dtype to be torch.bfloat16 or torch.float16, found {dtype}; pass one of these")
    if dtype == torch.float16 and step_in_backward:
        raise ChunkError(
            "expected step_in_backward with torch.bfloat16, found torch.float16, whose gradients are scaled, and may "
            "have to be skipped; use bfloat16, or leave step_in_backward out"
        )


def check_ranks(
    ranks: Ranks, optimizer: Optimizer, device: torch.device, dtype: torch.dtype, *, step_in_backward: bool
) -> None:
    """Refuses what cannot be spread over ranks.

    Raises:
        ChunkError: if so.
    """
    if ranks.group is None:
        return
    if dtype != torch.bfloat16:
        raise ChunkError(f"expected torch.bfloat16 over several ranks, found {dtype}; leave dtype out")
    if step_in_backward:
        raise ChunkError(
            "expected one update for all of a step over several ranks, found step_in_backward=True; leave it out"
        )
    if not treats_each_element_alone(optimizer, device):
        raise ChunkError(
            "expected an optimizer that treats each element of a tensor alone, since ranks keep pieces of tensors, "
            f"found {type(optimizer).__name__}, which does not, or cannot be tried; use another, such as AdamW"
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
    for one in tensors:
        _check_parameter(one)
    _check_bytes(model, tensors)
    for name, module in model.named_modules():
        _check_module(name or "the model", module)


def device_of(model: nn.Module, tensors: Sequence[ModelTensor], device: torch.device | str | None) -> torch.device:
    """The device that a model is on, or is to be on if it has no bytes yet.

    Raises:
        ChunkError: if there is no one such device.
    """
    there = {one.parameter.device for one in tensors}
    names = " and ".join(sorted(map(str, there)))
    if there != {torch.device("meta")}:
        if len(there) != 1 or torch.device("meta") in there:
            raise ChunkError(
                f"expected a model on one device, found its parameters on {names}; move it to the device that it is to "
                "run on"
            )
        if device is not None and _find_device(device) not in there:
            raise ChunkError(f"expected a model on {device}, found it on {names}; move it there, or leave device out")
        return there.pop()
    if device is None:
        raise ChunkError("expected device= for a model on the meta device, found none; pass the one to train it on")
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ChunkError(
                f"expected buffers with values, found {name} on the meta device; make only the parameters there, or "
                "give the module another buffer"
            )
    return _find_device(device)


def _find_device(device: torch.device | str) -> torch.device:
    """As tensors there have it."""
    return torch.empty(0, device=find_device(device, ChunkError)).device


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


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


def _check_bytes(model: nn.Module, tensors: Sequence[ModelTensor]) -> None:
    """Refuses what shares a parameter's bytes: the parameter gets others in chunks, and nothing would share those.

    Buffers may share bytes with each other: chunks leave them alone.
    """
    parameters: dict[torch.Tensor, str] = {one.parameter: one.name for one in tensors}
    buffers = {one: name for name, one in model.named_buffers() if one not in parameters}
    names = [*parameters.values(), *buffers.values()]
    for one, other in pairs_that_share([*parameters, *buffers]):
        if other < len(parameters):
            raise ChunkError(
                f"expected parameters with bytes of their own, found {names[one]} and {names[other]}, which share "
                f"theirs; make them one parameter ({names[other]} = {names[one]}), or give one of them a copy"
            )
        if one < len(parameters):
            raise ChunkError(
                f"expected buffers with bytes of their own, found {names[other]}, which shares those of the parameter "
                f"{names[one]}; make it a copy (clone()), or use the parameter in its place"
            )


def _check_module(name: str, module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_orig_mod"):
        raise ChunkError(
            f"expected modules that are not compiled yet, found {name}, a {type(module).__name__}; compile it after "
            "torch_lms.chunked"
        )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
        raise ChunkError(f"expected dense gradients, found {name} with sparse=True; build it with sparse=False")
