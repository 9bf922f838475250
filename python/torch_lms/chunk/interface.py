"""`torch_lms.chunked`: a model and its optimizer in chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torch_lms.chunk.budget import budget_of, check_budget, check_chunk, needed_bytes
from torch_lms.chunk.checkpointing import StateDictHooks
from torch_lms.chunk.checks import (
    check_arguments,
    check_model,
    check_optimizer,
    check_options,
    check_ranks,
    device_of,
    note_in_chunks,
)
from torch_lms.chunk.hooks import ModuleHooks
from torch_lms.chunk.layout import ALIGNMENT, Layout, best_chunk_numel, pack
from torch_lms.chunk.model_data import ModelData, ModelTensor
from torch_lms.chunk.occupancy import Occupancy
from torch_lms.chunk.optimizer import ChunkedOptimizer
from torch_lms.chunk.placement import UpdateChoice, chosen_update, hosted_chunks, measured_rates
from torch_lms.chunk.ranks import Ranks, ranks_of
from torch_lms.chunk.sharding import ShardedOccupancy
from torch_lms.chunk.trials import takes_new_tensors
from torch_lms.chunk.units import UnitHooks
from torch_lms.errors import ChunkError
from torch_lms.swap.automatic import change_limit, disable, present_limits

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["chunked", "runs_of", "tensors_of"]

M = TypeVar("M", bound=nn.Module)

_OPTIONS = (bool, int, float, str, tuple, type(None))  # of an optimizer's group: ranks have them alike


def chunked(
    model: M,
    optimizer: Optimizer,
    *,
    device_limit: int | str | None = None,
    host_limit: int | str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    chunk_numel: int | None = None,
    reuse_gradients: bool = True,
    step_in_backward: bool = False,
    update_on: Literal["auto", "device", "host", "stream"] = "auto",
    mesh: DeviceMesh | None = None,
    device: torch.device | str | None = None,
    order: Iterable[nn.Parameter] | None = None,
) -> tuple[M, ChunkedOptimizer]:
    """Holds a model's parameters and its optimizer's state in equal chunks, for training in mixed precision.

    Parameters become 16-bit numbers, which the model computes with, and so do the 32-bit inputs that it is called
    with, also those in lists, tuples and dicts. (The model gets copies of these: state that it is to keep in one has to
    be in its type. Batch norm stays as it is: its statistics would lose too much.) The optimizer updates 32-bit masters
    of them, and gradients take the place of the parameters: 6 bytes for each parameter, and what the optimizer keeps
    (8 for Adam). All of it is within the device's limit or on the host, and moves in chunks as activations move: by
    automatic mode, which is turned on. Then train as before: ``loss.backward()``, ``optimizer.step()``.

    Source: PatrickStar (arXiv 2108.05818).

    Args:
        model: on one device. It is changed, and returned.
        optimizer: of its parameters; any that treats each of them alone, as all of ``torch.optim`` but ``LBFGS`` do.
        device_limit: of the device's memory: bytes, ``"40GiB"``, or ``"50%"``. Without it, what `torch_lms.enable` has
            been told holds.
        host_limit: of the host memory (for a model on the CPU: the disk) for what is not on the device.
        dtype: of parameters and gradients: ``torch.bfloat16`` or ``torch.float16``.
        chunk_numel: elements of each chunk, not bytes; found by itself if left out.
        reuse_gradients: whether gradients take the place of parameters, where they can.
        step_in_backward: update each chunk during backward, as soon as its gradients are there. They are gone
            afterwards: for programs that call ``optimizer.step()`` after each backward, and do not look at gradients.
            Only with ``torch.bfloat16``, and not with ``mesh``.
        update_on: where masters and the optimizer's state are: ``"device"``, from where they are paged out as
            activations are; ``"host"``, whose processor updates them beside the device's work; or ``"stream"``, on the
            host, from where they stream through the device, which updates them: the same bits as on the device, and
            faster than a processor where the link is. ``"auto"`` keeps on the device what it has room for, which the
            second step shows (PyTorch's count of peak memory begins anew before it), and the rest on the host, from
            where it goes the way that takes least by rates that are measured here: see the optimizer's
            ``update_choice``.
        mesh: of one dimension (``mesh["dp"]``), of ranks that train the model together, each on its share of the batch:
            every rank keeps one part of each chunk, and all get the first one's model. All must call this, and then the
            model, alike. Gradients are means over ranks. Only with ``torch.bfloat16``.
        device: for a model whose parameters are on the meta device: where it is to be trained. Chunks are made there
            without a second copy in host memory, and `load_state_dict` fills them: with ``strict=False`` tensor by
            tensor. Buffers move there.
        order: in which the model uses its parameters, as `torch_lms.chunk.order_of_use` finds it out; what is not named
            follows. It is that of registration if left out; of several ranks, the first one's holds. What is used
            together should lie together: see the README of ``chunk`` for models for which that makes a difference.

    Returns:
        The model, and the optimizer to use from now on. State dicts of both are those of a plain model in 32 bits.

    Raises:
        ChunkError: for a model or an optimizer that cannot be held in chunks, and on all ranks if one of them is
            refused, or they do not call this alike. Nothing has changed then.
        LimitError: for a limit that cannot be understood.
    """
    ranks = ranks_of(mesh)
    with ranks.together() as alike:
        check_arguments(model, optimizer)
        tensors = tensors_of(model, optimizer)
        check_model(model, optimizer, tensors)
        switches = {"reuse_gradients": reuse_gradients, "step_in_backward": step_in_backward}
        check_options(dtype, update_on, chunk_numel, **switches)
        device = device_of(model, tensors, device)
        check_optimizer(optimizer, device, update_on)
        check_ranks(ranks, optimizer, device, dtype, step_in_backward=step_in_backward)
        names = _in_order(tensors, order)
        options = {"dtype": dtype, "chunk_numel": chunk_numel, "update_on": update_on, **switches}
        alike.update({name: str(value) for name, value in options.items()})
        alike.update(_described(model, optimizer, tensors))
    by_name = {one.name: one for one in tensors}
    runs = runs_of([by_name[name] for name in ranks.first_of(names)])
    ordered = [one for run in runs for one in run]
    layout = _layout_of(runs, chunk_numel, ranks)
    needed = needed_bytes(ordered, layout, ranks, optimizer, device)
    with ranks.together():
        budget = budget_of(device, device_limit, host_limit)
        check_chunk(layout, ranks, device, budget, update_on=update_on)
        if device.type != "cpu" or (device_limit is not None and host_limit is not None):
            check_budget(needed, device, budget, update_on=update_on)  # else it is the disk's, found out by writing
    if update_on == "auto":
        known = {"chunk_numel": layout.chunk_numel, "device_bytes": budget.device_bytes}
        measure = partial(measured_rates, optimizer, device, dtype, **known)
        may_stream = partial(takes_new_tensors, optimizer, device)
        choice = chosen_update(needed, device, budget.device_bytes, measure, may_stream)
    else:
        choice = UpdateChoice(update_on=update_on, given=True)
    each_bytes = (needed["masters"] + needed["optimizer state"]) // layout.chunks
    on_host = hosted_chunks(choice.update_on, [each_bytes] * layout.chunks, budget.host_bytes)
    with _limits(device, device_limit, host_limit):
        data = ModelData(ordered, layout, dtype, device, choice.update_on, on_host, ranks)
    note_in_chunks(tensors)
    _spread_buffers(model, ranks, device, move=bool(data.unfilled))
    chunked_optimizer = ChunkedOptimizer(optimizer, data, choice)
    ready = chunked_optimizer.gradient_ready if step_in_backward else _nothing
    alone = ranks.group is None
    occupancy = (Occupancy if alone else ShardedOccupancy)(
        data, reuse=reuse_gradients, gradient_ready=ready, settle=chunked_optimizer.settle
    )
    hooks = ModuleHooks() if alone else UnitHooks()
    fills = update_on == "auto" and any(data.on_host) and device.type == "cuda"
    chunked_optimizer.attach(occupancy, hooks, device_bytes=budget.device_bytes, fills=fills)
    hooks.attach(model, data, occupancy, dtype)
    StateDictHooks().attach(model, data, occupancy)
    return model, chunked_optimizer


def _layout_of(runs: list[list[ModelTensor]], chunk_numel: int | None, ranks: Ranks) -> Layout:
    sizes = [[one.parameter.numel() for one in run] for run in runs]
    numel = best_chunk_numel(sizes) if chunk_numel is None else chunk_numel
    if ranks.group is not None:  # for parts that are alike
        numel = -(-numel // (ALIGNMENT * ranks.size)) * ALIGNMENT * ranks.size
    return pack(sizes, numel)


@contextmanager
def _limits(device: torch.device, device_limit: int | str | None, host_limit: int | str | None) -> Iterator[None]:
    """Has automatic mode keep limits, if they are given; as before, if what is done within them fails."""
    if device_limit is None:
        yield
        return
    before = present_limits()
    change_limit({device: device_limit}, host_limit=host_limit)
    try:
        yield
    except BaseException:
        if before:
            change_limit({device: before.get(str(device), "100%")})
        else:
            disable()
        raise


def _spread_buffers(model: nn.Module, ranks: Ranks, device: torch.device, *, move: bool) -> None:
    """From the first rank to all; first, of a model that has no bytes yet, to where it is to be."""
    for buffer in model.buffers():
        if move:
            buffer.data = buffer.to(device)
        ranks.broadcast(buffer)


def _nothing(_: int) -> None:
    pass


def tensors_of(model: nn.Module, optimizer: Optimizer) -> list[ModelTensor]:
    """A model's parameters, with what is to be known of each.

    Raises:
        ChunkError: if the optimizer has others, or the model none.
    """
    groups = {one: place for place, group in enumerate(optimizer.param_groups) for one in group["params"]}
    wide = {
        one
        for module in model.modules()
        if isinstance(module, _NormBase) and module.running_mean is not None  # these have the type of its parameters
        for one in module.parameters(recurse=False)
    }
    found = [
        ModelTensor(name=name, parameter=one, group=place if one.requires_grad else None, wide=one in wide)
        for name, one in model.named_parameters()
        for place in [groups.pop(one, None)]
    ]
    if groups:
        shapes = ", ".join(str(tuple(one.shape)) for one in list(groups)[:3])
        raise ChunkError(
            f"expected an optimizer of the model's parameters alone, found {len(groups)} others (of shapes {shapes}); "
            "make it of model.parameters()"
        )
    if not found:
        raise ChunkError("expected a model with parameters, found none; pass the model that the optimizer is of")
    return found


def _described(model: nn.Module, optimizer: Optimizer, tensors: Sequence[ModelTensor]) -> dict[str, str]:
    """What ranks must have alike of a model and its optimizer."""
    buffers = {
        f"buffer {number}": f"{name} of shape {'unknown' if is_lazy(one) else tuple(one.shape)}, {one.dtype}"
        for number, (name, one) in enumerate(model.named_buffers())
    }
    parameters = {
        f"parameter {number}": f"{one.name} of shape {tuple(one.parameter.shape)}, strides {one.parameter.stride()}, "
        f"{one.parameter.dtype} on {one.parameter.device.type}, "
        f"{'frozen' if one.group is None else f'in group {one.group}'}"
        for number, one in enumerate(tensors)
    }
    groups = {
        f"group {place}": ", ".join(f"{key}={group[key]!r}" for key in sorted(group) if type(group[key]) in _OPTIONS)
        for place, group in enumerate(optimizer.param_groups)
    }
    return {"optimizer": type(optimizer).__name__, **parameters, **groups, **buffers}


def _in_order(tensors: list[ModelTensor], order: Iterable[nn.Parameter] | None) -> list[str]:
    """Their names as they are used, if the program says how."""
    known = {one.parameter: one.name for one in tensors}
    used = list(() if order is None else order if isinstance(order, Iterable) else [order])
    if strangers := [one for one in used if not isinstance(one, torch.Tensor) or one not in known]:
        found = ", ".join(
            f"one of shape {tuple(one.shape)}" if isinstance(one, torch.Tensor) else repr(one) for one in strangers[:3]
        )
        raise ChunkError(
            f"expected an order of the model's own parameters, found {len(strangers)} others ({found}); "
            "take it from torch_lms.chunk.order_of_use(model, ...)"
        )
    return [known[one] for one in {**dict.fromkeys(used), **known}]


def runs_of(tensors: list[ModelTensor]) -> list[list[ModelTensor]]:
    """What may share chunks, in order: the parameters of one group; those that are alike in kind."""
    runs: dict[tuple[int | None, bool], list[ModelTensor]] = {}
    for one in tensors:
        runs.setdefault((one.group, one.wide), []).append(one)
    return list(runs.values())
