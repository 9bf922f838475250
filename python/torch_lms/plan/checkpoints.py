"""A few places that stand for all: what keeps the limit there nearly keeps it everywhere."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["choose_checkpoints"]

MOST_CHECKPOINTS = 200


def choose_checkpoints(
    plain_bytes: NDArray[np.float64], durations_us: NDArray[np.float64], limit_bytes: float
) -> NDArray[np.int64]:
    """Of each of at most 200 groups of consecutive places, the one with the most memory in use.

    Groups are equal in a mixture of time and of places above the limit.

    Args:
        plain_bytes: in use at each place if all is kept.
        durations_us: of the ops.
        limit_bytes: of the memory in use.
    """
    needy = (plain_bytes > limit_bytes).astype(np.float64)
    weight = durations_us / max(float(durations_us.sum()), 1e-9) + needy / max(float(needy.sum()), 1.0)
    share = (np.cumsum(weight) - weight) / max(float(weight.sum()), 1e-9)
    group = np.minimum((share * MOST_CHECKPOINTS).astype(np.int64), MOST_CHECKPOINTS - 1)
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    ends = np.append(starts[1:], len(group))
    chosen = [first + int(np.argmax(plain_bytes[first:end])) for first, end in zip(starts, ends, strict=True)]
    return np.array(chosen, dtype=np.int64)
