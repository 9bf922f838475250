"""The interface of the MLMS manual, and the names that IBM LMS users know.

`attach` adds them to PyTorch where it does not have them (the patched fork does). The usual flow of
a step: ``create_swap_env``, forward with ``pageout_manual`` of what backward needs late,
``before_prefetch_wait_all``, ``prefetch_init``, ``need_prefetch`` in the order of backward,
``prefetch_all``, backward, ``close_swap_env``. (MLMS manual, chapters 4 and 5.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_lms._core import core
from torch_lms.errors import EnvError
from torch_lms.memory_sizes import parse_bytes
from torch_lms.swap import automatic, manual
from torch_lms.swap.limits import parse_limits

__all__ = ["attach"]

_env_open = False
_lms_limit: int | str | None = None
_lms_size_bytes: int | str = 1 << 20


def attach() -> None:
    """Adds the MLMS interface to ``torch.Tensor`` and ``torch.cuda``; keeps what is there already."""
    for name in ("pageout_manual", "need_prefetch", "need_prefech"):
        _add(torch.Tensor, name, pageout_manual if name == "pageout_manual" else need_prefetch)
    for function in (
        create_swap_env,
        prefetch_init,
        before_prefetch_wait_all,
        prefetch_all,
        close_swap_env,
        set_enabled_lms,
        get_enabled_lms,
        set_limit_lms,
        get_limit_lms,
        set_size_lms,
        get_size_lms,
    ):
        _add(torch.cuda, function.__name__, function)


def _add(owner: Any, name: str, function: Callable[..., Any]) -> None:
    if not hasattr(owner, name):
        setattr(owner, name, function)


# --- MLMS: the manual's chapter 5 ------------------------------------------------------------------


def create_swap_env() -> None:
    """Opens the transfer context.

    Raises:
        EnvError: if it is open already.
    """
    global _env_open
    if _env_open:
        raise EnvError("expected no open swap environment, found one; call torch.cuda.close_swap_env() first")
    core.start_pageouts()
    _env_open = True


def prefetch_init() -> None:
    """Prepares the page-in queue: from now on prefetches wait for `prefetch_all`."""
    _check_open()
    core.hold_pageins()


def pageout_manual(tensor: torch.Tensor) -> None:
    """Adds a tensor's storage to the tail of the page-out queue."""
    _check_open()
    manual.pageout(tensor)


def need_prefetch(tensor: torch.Tensor) -> None:
    """Adds a tensor's storage to the tail of the page-in queue."""
    _check_open()
    core.prefetch([tensor], start=False)


def before_prefetch_wait_all() -> None:
    """Waits until all page-outs are over."""
    _check_open()
    core.wait_pageouts()


def prefetch_all() -> None:
    """Starts the page-in queue."""
    _check_open()
    core.start_pageins()


def close_swap_env() -> None:
    """Closes the transfer context: waits for all transfers and pages everything in.

    Raises:
        EnvError: if it is not open.
    """
    global _env_open
    _check_open()
    _env_open = False
    core.start_pageins()
    try:
        manual.wait()
    finally:
        core.pagein_all()


def _check_open() -> None:
    if not _env_open:
        raise EnvError("expected an open swap environment, found none; call torch.cuda.create_swap_env() first")


# --- the names of IBM LMS ---------------------------------------------------------------------------


def set_enabled_lms(enabled: bool) -> None:
    """Turns automatic mode on or off, with the limit and size set before."""
    if enabled:
        automatic.enable(_lms_limit, min_bytes=_lms_size_bytes)
    else:
        automatic.disable()


def get_enabled_lms() -> bool:
    """Whether automatic mode is on."""
    return automatic.is_enabled()


def set_limit_lms(limit: int | str | None) -> None:
    """Sets the limit of each device, at once if automatic mode is on."""
    global _lms_limit
    parse_limits(limit)  # raises before anything is changed
    if automatic.is_enabled():
        automatic.change_limit(limit)
    _lms_limit = limit


def get_limit_lms() -> int | str | None:
    """The limit that was set last."""
    return _lms_limit


def set_size_lms(size: int | str) -> None:
    """Sets the least size of a storage that may be paged out, at once if automatic mode is on."""
    global _lms_size_bytes
    parse_bytes(size)  # raises before anything is changed
    if automatic.is_enabled():
        automatic.change_limit(automatic.present_limits(), min_bytes=size)
    _lms_size_bytes = size


def get_size_lms() -> int | str:
    """The least size that was set last."""
    return _lms_size_bytes
