"""Whether a model's data finds room, before anything is made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from torch_lms._core import core
from torch_lms.chunk.layout import Layout
from torch_lms.chunk.model_data import ModelTensor
from torch_lms.chunk.ranks import Ranks
from torch_lms.chunk.trials import state_bytes_each
from torch_lms.errors import ChunkError
from torch_lms.memory_sizes import parse_bytes, size_text
from torch_lms.swap.automatic import is_enabled

__all__ = ["Budget", "budget_of", "check_budget", "check_chunk", "needed_bytes"]

_HOST_SHARE = 0.8  # of the host's memory, where no limit is given; as automatic mode takes it


def needed_bytes(
    tensors: Sequence[ModelTensor], layout: Layout, ranks: Ranks, optimizer: Optimizer, device: torch.device
) -> dict[str, int]:
    """What one rank's parts of all lists take, once the optimizer has stepped."""
    trained = {place.chunk for one, place in zip(tensors, layout.places, strict=True) if one.group is not None}
    wide = {place.chunk for one, place in zip(tensors, layout.places, strict=True) if one.wide}

    def room(chunks: set[int], each: int) -> int:
        cut, whole = len(chunks - wide), len(chunks & wide)
        return (cut * (layout.chunk_numel // ranks.size) + whole * layout.chunk_numel) * each

    return {
        "parameters": room(set(range(layout.chunks)) - wide, 2),
        "masters": room(trained, 4),
        "optimizer state": room(trained, state_bytes_each(optimizer, device)),
    }


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a program may use.

    Attributes:
        device_bytes: of the device's memory.
        host_bytes: of the host's, for what is not on the device.
    """

    device_bytes: int
    host_bytes: int


def budget_of(device: torch.device, device_limit: int | str | None, host_limit: int | str | None) -> Budget:
    """By the limits that `torch_lms.chunked` has got, those of automatic mode, or the memory that there is.

    Raises:
        ChunkError: for more host memory than there is.
    """
    total_bytes, host_total_bytes = core.total_bytes(str(device)), core.total_bytes("cpu")
    budget = Budget(
        device_bytes=_limit_bytes(device) or total_bytes
        if device_limit is None
        else parse_bytes(device_limit, total_bytes=total_bytes),
        host_bytes=int(_HOST_SHARE * host_total_bytes)
        if host_limit is None
        else parse_bytes(host_limit, total_bytes=host_total_bytes),
    )
    if device.type != "cpu" and budget.host_bytes > host_total_bytes:
        raise ChunkError(
            f"expected host_limit within the host's memory of {size_text(host_total_bytes)}, found "
            f"{size_text(budget.host_bytes)}; lower it"
        )
    return budget


def check_budget(needed: dict[str, int], device: torch.device, budget: Budget, *, update_on: str) -> None:
    """Refuses what there is no room for.

    Args:
        needed: bytes, by what they hold.
        device: of the model.
        budget: of the program.
        update_on: as `torch_lms.chunked` has got it.

    Raises:
        ChunkError: with what is needed and what there is.
    """
    parts = ", ".join(f"{name} {size_text(nbytes)}" for name, nbytes in needed.items())
    if sum(needed.values()) > budget.device_bytes + budget.host_bytes:
        raise ChunkError(
            f"expected room for the model's data, {size_text(sum(needed.values()))} ({parts}), found "
            f"{size_text(budget.device_bytes)} on {device} and {size_text(budget.host_bytes)} on the host; raise "
            "device_limit or host_limit, use more ranks, or a smaller model"
        )
    there = needed["masters"] + needed["optimizer state"]
    if update_on in ("host", "stream") and device.type != "cpu" and there > budget.host_bytes:
        raise ChunkError(
            f"expected room on the host for {size_text(there)} ({parts}), found {size_text(budget.host_bytes)}; raise "
            "host_limit, or leave update_on out"
        )


def check_chunk(layout: Layout, ranks: Ranks, device: torch.device, budget: Budget, *, update_on: str) -> None:
    """Refuses chunks of which the device could not hold one.

    Raises:
        ChunkError: if so.
    """
    nbytes = 2 * layout.chunk_numel
    if device.type == "cpu" or update_on == "device":  # otherwise masters may stay on the host
        nbytes = max(nbytes, 4 * layout.chunk_numel // ranks.size)
    if nbytes > budget.device_bytes:
        raise ChunkError(
            f"expected room on {device} for a chunk of {layout.chunk_numel} elements, {size_text(nbytes)}, found "
            f"{size_text(budget.device_bytes)}; raise device_limit, lower chunk_numel, or leave it out"
        )


def _limit_bytes(device: torch.device) -> int:
    """What automatic mode keeps this one device within; 0 without a limit, as on the fork, which has no such mode."""
    return core.memory_report(str(device))["limit_bytes"] if is_enabled() else 0
