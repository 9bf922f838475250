"""Devices by name, and the one that a model is on."""

from __future__ import annotations

import torch
from torch import nn

from torch_lms.errors import ProfileError

__all__ = ["device_of", "find_device", "fits"]


def find_device(name: str | torch.device) -> torch.device:
    """A device that is there, with its index.

    Raises:
        ProfileError: if it is not.
    """
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ProfileError(
            f"expected a device such as 'cuda:0', found {name!r}; name one that PyTorch knows"
        ) from error
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ProfileError(
                f"expected a device that is there, found {name!r} with {count} CUDA devices; name another"
            )
        index = device.index if device.index is not None else torch.cuda.current_device()
        return torch.device("cuda", index)
    if device.type not in ("cpu", "meta"):
        try:
            torch.empty(1, device=device)
        except Exception as error:
            raise ProfileError(f"expected a device that is there, found {name!r}: {error}; name another") from error
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
