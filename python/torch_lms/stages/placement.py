"""Where a stage goes: a device of this process, or one that belongs to another rank."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from torch_lms.errors import PartitionError

__all__ = ["Placement", "find_device", "parse_placement"]

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
    """A device of this process.

    Raises:
        PartitionError: if there is no such device here.
    """
    device = parse_placement(place).device
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise PartitionError(
                f"expected a device that is here, found {device}; this process sees {count} CUDA devices: "
                "choose one of these, or start on a machine that has it"
            )
    elif device.type not in ("cpu", "meta"):
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise PartitionError(
                f"expected a device that is here, found {device}: {error}; choose 'cpu' or a CUDA device"
            ) from error
    return device
