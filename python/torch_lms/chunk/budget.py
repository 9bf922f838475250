"""Whether a model's data finds room, before anything is made of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from torch_lms._core import core
from torch_lms.chunk.layout import Layout
from torch_lms.chunk.model_data import ModelTensor
from torch_lms.chunk.ranks import Ranks
from torch_lms.chunk.trials import state_bytes_each
from torch_lms.errors import ChunkError
from torch_lms.swap.limits import parse_bytes

__all__ = ["check_budget", "needed_bytes"]

_HOST_SHARE = 0.8  # of the host's memory, where no limit is given; as automatic mode takes it
_GIB = 1 << 30


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


def check_budget(
    needed: dict[str, int],
    device: torch.device,
    device_limit: int | str | None,
    host_limit: int | str | None,
    *,
    update_on: str,
) -> None:
    """Refuses what limits, or the memory that there is, leave no room for.

    Args:
        needed: bytes, by what they hold.
        device: of the model.
        device_limit: as `torch_lms.chunked` has got it.
        host_limit: likewise.
        update_on: likewise.

    Raises:
        ChunkError: with what is needed and what there is.
    """
    if device.type == "cpu" and (device_limit is None or host_limit is None):
        return  # what the disk has room for is found out by writing to it
    host_bytes = core.total_bytes("cpu")
    on_device = parse_bytes("100%" if device_limit is None else device_limit, total_bytes=core.total_bytes(str(device)))
    on_host = int(_HOST_SHARE * host_bytes) if host_limit is None else parse_bytes(host_limit, total_bytes=host_bytes)
    if device.type != "cpu" and on_host > host_bytes:
        raise ChunkError(
            f"expected host_limit within the host's memory of {_gib(host_bytes)}, found {_gib(on_host)}; lower it"
        )
    parts = ", ".join(f"{name} {_gib(nbytes)}" for name, nbytes in needed.items())
    if sum(needed.values()) > on_device + on_host:
        raise ChunkError(
            f"expected room for the model's data, {_gib(sum(needed.values()))} ({parts}), found {_gib(on_device)} on "
            f"{device} and {_gib(on_host)} on the host; raise device_limit or host_limit, use more ranks, or a smaller "
            "model"
        )
    there = needed["masters"] + needed["optimizer state"]
    if update_on == "host" and device.type != "cpu" and there > on_host:
        raise ChunkError(
            f"expected room on the host for {_gib(there)} ({parts}), found {_gib(on_host)}; raise host_limit, or leave "
            "update_on out"
        )


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:.3g} GiB"
