"""Devices by name."""

from __future__ import annotations

from typing import Any

import torch

from torch_lms.errors import LmsError

__all__ = ["find_device"]


def find_device(name: Any, error: type[LmsError]) -> torch.device:
    """A device of this process, with its index.

    Args:
        name: as PyTorch names devices.
        error: what is raised if it is not there.

    Raises:
        LmsError: as ``error`` says.
    """
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as unknown:
        raise error(f"expected a device such as 'cuda:0', found {name!r}; name one that PyTorch knows") from unknown
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise error(
                f"expected a device that is here, found '{device}'; this process sees {count} CUDA devices: choose one "
                "of these, or start on a machine that has it"
            )
        return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    if device.type not in ("cpu", "meta"):
        try:
            torch.empty(1, device=device)
        except Exception as missing:
            raise error(
                f"expected a device that is here, found '{device}': {missing}; choose 'cpu' or a CUDA device"
            ) from missing
    return device
