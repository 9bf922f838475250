"""Where a stage goes: a device of this process, or one that belongs to another rank."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from torch_lms import devices
from torch_lms.errors import PartitionError

__all__ = ["Placement", "find_device", "own_rank", "parse_placement"]

_REMOTE = re.compile(r"^(?:rank:(?P<rank>\d+)/)(?P<device>.+)$")


@dataclass(frozen=True)
class Placement:
    """A device, and the rank that it belongs to where that was said.

    Attributes:
        device: as the owning rank names it.
        rank: None for a device of this process.
    """

    device: torch.device
    rank: int | None = None

    def is_local(self, own_rank: int) -> bool:
        """Whether this process is the one to put the stage there."""
        return self.rank is None or self.rank == own_rank

    def __str__(self) -> str:
        return str(self.device) if self.rank is None else f"rank:{self.rank}/{self.device}"


def parse_placement(place: Any) -> Placement:
    """Reads ``"cuda:1"``, a ``torch.device``, or with a rank ``"rank:1/cuda:0"``, which is how RemoteDevice prints.

    Raises:
        PartitionError: if it names no device.
    """
    text = str(place)
    found = _REMOTE.match(text)
    rank, name = (int(found.group("rank")), found.group("device")) if found else (None, text)
    try:
        return Placement(torch.device(name), rank)
    except RuntimeError as error:
        raise PartitionError(
            f"expected a device such as 'cuda:0', 'cpu' or 'rank:1/cuda:0', found {text!r}; name one"
        ) from error


def find_device(place: Any) -> torch.device:
    """The device of a place in this process, with its index.

    Raises:
        PartitionError: if there is no such device here.
    """
    return devices.find_device(parse_placement(place).device, PartitionError)


def own_rank() -> int:
    """This process's rank; 0 without torch.distributed."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
