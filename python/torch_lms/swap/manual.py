"""Paging by hand: what the program asks for, when it asks for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import torch

from torch_lms._core import core
from torch_lms._torch_compat import is_storage
from torch_lms.swap import intercepts

__all__ = ["is_resident", "pageout", "pin", "prefetch", "state", "unpin", "wait"]

Pageable: TypeAlias = "torch.Tensor | torch.UntypedStorage"  # a text, since 1.12 has another name for the second
Pageables: TypeAlias = "Pageable | Iterable[Pageable]"


def _flatten(items: tuple[Pageables, ...]) -> list[Pageable]:
    flat: list[Pageable] = []
    for item in items:
        if isinstance(item, torch.Tensor) or is_storage(item):
            flat.append(item)
        elif isinstance(item, Iterable):
            flat.extend(item)
        else:
            raise TypeError(
                f"expected tensors, storages or iterables of them, found {type(item).__name__}; pass tensors"
            )
    return flat


def pageout(*tensors: Pageables) -> int:
    """Enqueues page-outs of the storages behind tensors; returns before they are over.

    A storage's device memory is given back at the first op (or `wait`) after its copy has
    finished. Using the storage before that calls the page-out off. A storage that is paged out
    already, that has no bytes, or that a running op uses is left alone.

    Args:
        tensors: tensors or storages on a CPU or CUDA device, or iterables of them. Views page out
            the whole storage that they share.

    Returns:
        How many page-outs were enqueued. What left at once is not counted: bytes of which the host
        still had a copy (automatic mode).

    Raises:
        PageoutError: for a storage that cannot be paged out (meta and sparse tensors, memory that
            is numpy's, shared, pinned or mapped, pinned storages). Those before it are enqueued.
        LmsError: in a forked child.
    """
    intercepts.install()
    return core.pageout(_flatten(tensors))


def prefetch(*tensors: Pageables) -> int:
    """Enqueues page-ins of the storages behind tensors; returns before they are over.

    Prefetching is a hint: without room on the device a storage stays where it is, and is paged
    in when it is used. A page-out that is not over is called off. Storages that are resident are left alone.

    Args:
        tensors: as for `pageout`.

    Returns:
        How many page-ins were enqueued, with the page-outs that were called off.

    Raises:
        PageoutError: for a tensor without a storage (a sparse one, a wrapper). Nothing is enqueued then.
        LmsError: in a forked child.
    """
    return core.prefetch(_flatten(tensors))


def wait() -> None:
    """Waits until every page-out and page-in that was asked for is over.

    Inside of an op (in a hook on what is saved, say) it waits for copies, but not for page-outs that running ops of
    other threads hold back, since these may wait for this op in the same way: they go out when the ops are over.

    Raises:
        HostPoolFullError: if a page-out found the host limit reached; the storage is resident.
        SpillError: if a page-out found no room on disk; the storage is resident.
        LmsError: if a transfer failed, or in a forked child.
    """
    try:
        core.wait_pageouts()
    finally:
        core.wait_pageins()


def pin(tensor: Pageable) -> None:
    """Keeps a storage where it is: pages it in, and refuses page-outs until `unpin`.

    For storages whose address has been given away (to another library, a captured graph, a
    kernel that runs on its own). Storages handed to numpy or DLPack while paging is on are
    pinned by themselves, though not on a PyTorch with the fork's patches. Each `pin` needs a
    `torch_lms.swap.unpin` of its own. Without room on the device the storage stays on the host, and
    comes in when there is room.

    Args:
        tensor: a tensor or a storage; a view pins the whole storage that it shares.

    Raises:
        PageoutError: for a tensor without a storage (a sparse one, a wrapper).
        LmsError: in a forked child.
    """
    core.pin(tensor)


def unpin(tensor: Pageable) -> None:
    """Undoes one `pin`: after the last one the storage may be paged out again.

    Args:
        tensor: as for `pin`.

    Raises:
        LmsError: if the storage is not pinned; and where `pin` raises it.
    """
    core.unpin(tensor)


def state(tensor: Pageable) -> str:
    """Where a storage is.

    Returns:
        ``resident``, ``out_queued``, ``paging_out``, ``paged_out``, ``in_queued``, ``paging_in``, or ``dropped``: by a
        plan, whose next use makes it again.

    Raises:
        LmsError: in a forked child.
    """
    return core.state(tensor)


def is_resident(tensor: Pageable) -> bool:
    """Whether a storage's bytes are on its device (also while a page-out is under way)."""
    return state(tensor) in ("resident", "out_queued", "paging_out")
