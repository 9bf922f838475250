"""What paging has done so far."""

from __future__ import annotations

from dataclasses import dataclass

from torch_lms._core import core

__all__ = ["SwapStats", "stats"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SwapStats:
    """Counters since the start or the last reset, and gauges of this moment.

    Attributes:
        pageout_bytes: bytes of committed page-outs.
        pagein_bytes: bytes of page-ins, passive and prefetched.
        pageouts: number of committed page-outs.
        pageins: number of page-ins.
        passive_pageins: faults: page-ins that an access had to do itself.
        prefetches: page-ins that were asked for ahead of need.
        prefetch_hits: prefetches that brought the bytes before, or while, they were needed.
        cancelled_pageouts: page-outs called off because the storage was used again.
        dropped_bytes: bytes that left without a copy, since the host still had one that was not stale.
        recomputable_bytes: bytes that left without a copy, since the op that made them can be run again.
        recomputed_bytes: of these, bytes that were needed again and have been made again.
        recomputations: how often an op was run again for that.
        host_served: accesses that worked on the host copy for want of room.
        limit_exceeded: allocations that went beyond the limit, inside calls of other extensions' code.
        pagein_failures: page-ins that found no room.
        allocation_retries: allocations that failed within the limit (fragmentation) and were repeated.
        wait_us: time that ops waited for page-outs to make room, in microseconds.
        paged_out_bytes: gauge: bytes that are off the device now: on the host, or dropped, to be made again.
        paged_out_storages: gauge: storages that are so.
        tracked_storages: gauge: storages that are known, dead ones not yet swept included.
        host_bytes: gauge: host memory (or disk) that is held for paged-out bytes.
        host_used_bytes: gauge: the part of ``host_bytes`` in use.
        host_limit_bytes: gauge: the limit of ``host_bytes``.
        allocated_bytes: gauge: bytes that tensors hold on the devices in use; those of the CPU only while
            they are counted (automatic mode, or `count_cpu_allocations`).
        peak_allocated_bytes: their peak since the start or the last reset.
        limit_bytes: gauge: what the devices are kept within; 0 without a limit.
    """

    pageout_bytes: int
    pagein_bytes: int
    pageouts: int
    pageins: int
    passive_pageins: int
    prefetches: int
    prefetch_hits: int
    cancelled_pageouts: int
    dropped_bytes: int
    recomputable_bytes: int
    recomputed_bytes: int
    recomputations: int
    host_served: int
    limit_exceeded: int
    pagein_failures: int
    allocation_retries: int
    wait_us: int
    paged_out_bytes: int
    paged_out_storages: int
    tracked_storages: int
    host_bytes: int
    host_used_bytes: int
    host_limit_bytes: int
    allocated_bytes: int
    peak_allocated_bytes: int
    limit_bytes: int


def stats(*, reset: bool = False) -> SwapStats:
    """Returns what paging has done so far, in this process and on all devices.

    Args:
        reset: start counting anew; gauges stay as they are. On a CUDA device this also resets
            PyTorch's own peak statistics.

    Raises:
        LmsError: in a forked child.
    """
    return SwapStats(**core.stats(reset))
