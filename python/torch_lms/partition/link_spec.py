"""How fast bytes get from one device to another, or to the host."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch_lms.errors import PartitionError

__all__ = ["LinkSpec"]


@dataclass(frozen=True, kw_only=True)
class LinkSpec:
    """One direction of the way between two devices; both directions run at once.

    Attributes:
        bytes_per_us: the rate, in bytes per microsecond: 1 GB/s is 1000.
        latency_us: what each transfer takes besides, in microseconds.

    Raises:
        PartitionError: for a rate that is not positive, or a latency that is negative or without end.
    """

    bytes_per_us: float = float("inf")
    latency_us: float = 0.0

    def __post_init__(self) -> None:
        if not self.bytes_per_us > 0 or not 0 <= self.latency_us < math.inf:
            raise PartitionError(f"expected a positive rate and a finite latency of at least 0, found {self}")

    def transfer_us(self, nbytes: Any) -> Any:
        """The time for that many bytes, a number or an array; nothing is sent where there are none."""
        return (nbytes > 0) * self.latency_us + nbytes / self.bytes_per_us
