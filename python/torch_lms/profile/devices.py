"""Devices by name, and the one that a model is on."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torch_lms.errors import LmsError, ProfileError

__all__ = ["device_of", "find_device", "fits"]


def find_device(name: Any, error: type[LmsError] = ProfileError) -> torch.device:
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


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's parameters and buffers; the CPU if it has none.

    Raises:
        ProfileError: if they are on several.
    """
    found = {tensor.device for tensor in [*model.parameters(), *model.buffers()]}
    if len(found) > 1:
        names = ", ".join(sorted(map(str, found)))
        raise ProfileError(f"expected a model on one device, found {type(model).__name__} on {names}; move it to one")
    return next(iter(found), torch.device("cpu"))


def fits(model: nn.Module, device: torch.device) -> bool:
    """Whether a model on another device has room on this one, with its gradients; activations are not known yet."""
    if device.type != "cuda" or device_of(model) == device:
        return True
    needed = sum(tensor.numel() * tensor.element_size() * (1 + tensor.requires_grad) for tensor in model.parameters())
    free, _ = torch.cuda.mem_get_info(device)
    return needed <= free
