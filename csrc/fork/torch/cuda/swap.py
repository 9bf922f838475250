r"""Large model support: tensors that leave the device and come back by themselves.

A step of a training program::

    torch.cuda.create_swap_env()
    torch.cuda.prefetch_init()
    loss = model(batch)                       # activations.pageout_manual() on the way
    torch.cuda.before_prefetch_wait_all()
    for activation in reversed(activations):
        activation.need_prefetch()
    torch.cuda.prefetch_all()
    loss.backward()
    torch.cuda.close_swap_env()

An access to a tensor that is away brings it back first, whatever accesses it: an operator,
NumPy, DLPack, the pickler, another library. The functions here decide only when.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "before_prefetch_wait_all",
    "close_swap_env",
    "create_swap_env",
    "prefetch_all",
    "prefetch_init",
]


def create_swap_env(host_limit: int = 0) -> None:
    r"""Opens the transfer context: from now on tensors can be paged out.

    Args:
        host_limit: the most host memory, in bytes, for what is paged out. 0 stands for a part (80 %) of what
            the machine and its control groups allow.

    Raises:
        RuntimeError: if it is open already, or this PyTorch has no CUDA.
    """
    torch.ops.storage_swap.create_env(host_limit)


def prefetch_init() -> None:
    r"""Prepares the page-in queue: waits for page-ins under way; new prefetches wait for :func:`prefetch_all`."""
    torch.ops.storage_swap.prefetch_init()


def before_prefetch_wait_all() -> None:
    r"""Waits until all page-outs are over.

    Raises:
        RuntimeError: if one failed. Its tensor is on the device then, unharmed.
    """
    torch.ops.storage_swap.wait_pageouts()


def prefetch_all() -> None:
    r"""Starts the page-in queue: prefetches go on, in their order, while the program runs."""
    torch.ops.storage_swap.prefetch_all()


def close_swap_env() -> None:
    r"""Closes the transfer context: waits for all transfers and pages everything in.

    Raises:
        RuntimeError: if it is not open, or something failed on the way. The context is closed all the same, and
            what is still away comes back when it is accessed.
    """
    torch.ops.storage_swap.close_env()


def is_swap_env_open() -> bool:
    r"""Whether the transfer context is open."""
    return bool(torch.ops.storage_swap.is_open())


def state(tensor: Tensor) -> str:
    r"""Where a tensor's bytes are.

    Returns:
        ``resident``, ``out_queued``, ``paging_out``, ``paged_out``, ``in_queued`` or ``paging_in``.
    """
    return str(torch.ops.storage_swap.state(tensor))


def stats(reset: bool = False) -> dict[str, int]:
    r"""What paging has done since the program began or the last reset, and where things are now.

    Args:
        reset: start counting anew. Gauges (``paged_out_*``, ``tracked_storages``, ``host_*``) stay as they are.

    Returns:
        ``pageouts``, ``pageins`` (of them ``passive_pageins``, which an access had to do itself, and
        ``prefetch_hits``), ``prefetches`` that were enqueued, ``cancelled_pageouts``, which an access called off,
        ``pagein_failures``, which found no room, all with their ``_bytes`` where they have some;
        ``paged_out_storages`` and ``paged_out_bytes`` at this moment; ``tracked_storages``, which were paged out at
        least once; and of the host memory ``host_bytes``, ``host_used_bytes`` and ``host_limit_bytes``.
    """
    return dict(torch.ops.storage_swap.stats(reset))
