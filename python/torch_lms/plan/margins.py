"""How far below its limit a plan stays."""

from __future__ import annotations

from torch_lms.plan.trace import Trace

__all__ = ["lost_share", "margins"]

_MARGIN_SHARE = 32  # of the limit, which the allocator's rounding and small differences take
_MARGIN_BYTES = 1 << 30
_MOST_MARGIN_SHARE = 8
_MORE_LOST, _MUCH_LOST = 0.04, 0.1  # of a step


def margins(trace: Trace, limit_bytes: int, *, lost: float = 0.0) -> dict[str, int]:
    """Arguments of a `Request`. On CUDA, free memory lies in pieces, and is to hold the largest storage.

    Where that has turned out to be too little, it is to hold two of them, or as much as may be.

    Args:
        trace: of the program.
        limit_bytes: of the device's memory.
        lost: by the steps of a plan, see `lost_share`.
    """
    margin_bytes = min(limit_bytes // _MARGIN_SHARE, _MARGIN_BYTES)
    largest_bytes = max((storage.bytes for storage in trace.storages), default=0)
    most_bytes = limit_bytes // _MOST_MARGIN_SHARE - margin_bytes
    wanted_bytes = largest_bytes if lost < _MORE_LOST else 2 * largest_bytes if lost < _MUCH_LOST else most_bytes
    pieces_bytes = min(wanted_bytes, most_bytes) if trace.device.startswith("cuda") else 0
    return {"margin_bytes": margin_bytes, "pieces_bytes": pieces_bytes}


def lost_share(predicted_us: float, step_us: float, wait_us: float) -> float:
    """What a plan's steps have lost since no memory in one piece was found in time; a share of what it predicts.

    It is what they have taken longer, as far as their ops have waited for memory: the rest has other causes.

    Args:
        predicted_us: by the plan, for a step.
        step_us: what a step has taken; 0 if that is not known.
        wait_us: what a step's ops have waited for memory.
    """
    return max(0.0, min(step_us - predicted_us, wait_us)) / predicted_us if predicted_us > 0 else 0.0
