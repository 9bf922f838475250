"""Limits as people write them."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from torch_lms._core import core
from torch_lms.errors import LimitError
from torch_lms.memory_sizes import parse_bytes

__all__ = ["Limit", "device_name", "parse_limits"]

Limit = int | str | None

_HOW_TO_BUILD = "install it where PyTorch has CUDA and the CUDA toolkit is found (CUDA_HOME)"


def parse_limits(limit: Limit | Mapping[str | torch.device, int | str]) -> dict[str, int]:
    """Turns ``limit=`` of `torch_lms.enable` into bytes for each device.

    A bare limit is that of the CUDA devices that this process uses (see `_used_devices`), or of the CPU where there is
    none. No limit means all of the device's memory.

    Raises:
        LimitError: if a size or a device cannot be understood, or a device is not there or there twice.
    """
    if not isinstance(limit, Mapping):
        value = "100%" if limit is None else limit
        count = torch.cuda.device_count()
        if count and not core.has_cuda:
            raise LimitError(
                f"expected a build of torch_lms with CUDA for the {count} CUDA devices there are, found one for the "
                f"CPU only; {_HOW_TO_BUILD}, or limit the CPU by its name: limit={{'cpu': {value!r}}}"
            )
        devices = _used_devices() if count else ["cpu"]
        return {name: parse_bytes(value, total_bytes=core.total_bytes(name)) for name in devices}
    if not limit:
        raise LimitError("expected at least one device in limit=, found an empty mapping; pass {'cuda:0': '24GiB'}")
    limits: dict[str, int] = {}
    for device, size in limit.items():
        name = device_name(device)
        if name in limits:
            raise LimitError(f"expected one limit for each device, found two for {name}, as {device!r} too; keep one")
        limits[name] = parse_bytes(size, total_bytes=core.total_bytes(name))
    return limits


def _used_devices() -> list[str]:
    """The current CUDA device, and those with a context: others have to be named.

    To limit a device makes a context on it, which takes hundreds of megabytes, also of devices that belong to another
    process of the same program.
    """
    current = torch.cuda.current_device()
    others = [index for index in range(torch.cuda.device_count()) if index != current and _has_context(index)]
    return [f"cuda:{index}" for index in (current, *others)]


def _has_context(index: int) -> bool:
    return bool(torch._C._cuda_hasPrimaryContext(index))  # type: ignore[attr-defined]  # in builds with CUDA


def device_name(device: str | torch.device) -> str:
    """A device's full name, ``cuda:0`` for ``cuda``, or an error for what is not there."""
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise LimitError(f"expected a device such as 'cuda:0' or 'cpu', found {device!r}; correct its name") from error
    if parsed.type == "cpu":
        return "cpu"
    if parsed.type != "cuda":
        raise LimitError(f"expected a cpu or cuda device, found {device!r}; other devices cannot be paged")
    if not core.has_cuda:
        raise LimitError(
            f"expected a build of torch_lms with CUDA for {device!r}, found one for the CPU only; {_HOW_TO_BUILD}"
        )
    index = parsed.index if parsed.index is not None else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        of = "" if visible is None else f" of those that CUDA_VISIBLE_DEVICES={visible} shows"
        raise LimitError(
            f"expected one of {torch.cuda.device_count()} CUDA devices{of}, found {device!r}; count from cuda:0"
        )
    return f"cuda:{index}"
