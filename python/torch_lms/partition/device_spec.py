"""What a stage runs on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_lms.errors import PartitionError
from torch_lms.memory_sizes import parse_bytes

__all__ = ["DeviceSpec"]


@dataclass(frozen=True, kw_only=True, init=False)
class DeviceSpec:
    """Where a stage runs.

    Attributes:
        name: as the links name it, such as ``cuda:0``.
        memory_cap_bytes: of the device; None where it does not matter. May be given as a text such as ``"40GiB"``.
        speed: a node takes its time divided by this.

    Raises:
        PartitionError: for a cap that is not positive, or a speed that is not positive and finite.
        LimitError: for a text that is no size.
    """

    name: str
    memory_cap_bytes: int | None
    speed: float

    def __init__(self, *, name: str, memory_cap_bytes: int | str | None = None, speed: float = 1.0) -> None:
        cap = parse_bytes(memory_cap_bytes) if isinstance(memory_cap_bytes, str) else memory_cap_bytes
        if not 0 < speed < math.inf:
            raise PartitionError(
                f"expected a positive and finite speed of {name}, found {speed}; 1 is the profiled device"
            )
        if cap is not None and cap <= 0:
            raise PartitionError(f"expected a positive memory cap of {name}, found {cap}; None means no cap")
        for attribute, value in (("name", name), ("memory_cap_bytes", cap), ("speed", speed)):
            object.__setattr__(self, attribute, value)
