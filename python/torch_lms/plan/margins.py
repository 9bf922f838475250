"""How far below its limit a plan stays."""

from __future__ import annotations

from torch_lms.plan.trace import Trace

__all__ = ["margins"]

_MARGIN_SHARE = 32  # of the limit, which the allocator's rounding and small differences take
_MARGIN_BYTES = 1 << 30
_MOST_MARGIN_SHARE = 8


def margins(trace: Trace, limit_bytes: int, *, is_crowded: bool) -> dict[str, int]:
    """Arguments of a `Request`. On CUDA, free memory lies in pieces, and is to hold the largest storage.

    Args:
        trace: of the program.
        limit_bytes: of the device's memory.
        is_crowded: that has turned out to be too little; then it is as much as may be.
    """
    margin_bytes = min(limit_bytes // _MARGIN_SHARE, _MARGIN_BYTES)
    largest_bytes = max((storage.bytes for storage in trace.storages), default=0)
    most_bytes = limit_bytes // _MOST_MARGIN_SHARE - margin_bytes
    wanted_bytes = most_bytes if is_crowded else min(largest_bytes, most_bytes)
    pieces_bytes = wanted_bytes if trace.device.startswith("cuda") else 0
    return {"margin_bytes": margin_bytes, "pieces_bytes": pieces_bytes}
