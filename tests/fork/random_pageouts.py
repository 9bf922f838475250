"""Every storage of a program is paged out at random between its ops, through the fork's own runtime.

    import random_pageouts
    random_pageouts.begin(seed=0)

The program must not notice. So nothing that it can see is changed: no mode is pushed (a `TorchFunctionMode` alters
what has a torch function, and what warnings point at; a `TorchDispatchMode` alters dispatch, and refuses some programs
altogether) and no tracing function is set. Instead ``random_pageouts.cpp``, compiled on first use, listens to
`at::RecordFunction` as profilers do. It sees the ops of all threads, and the storages that only autograd keeps. For a
machine without a compiler, ``compile_native(folder)`` makes the module elsewhere; one on Python's path is taken.

What a program may not do on the fork is page out a storage whose address it has given away (``csrc/fork/README.md``,
Limits). Here it is not the program that chooses, so these storages are left alone: `numpy`, `data_ptr`, DLPack and
slices of storages are watched for that, in Python. `apply_`, `map_` and `map2_` call Python while they hold an address;
nothing moves meanwhile.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.utils.dlpack

__all__ = ["begin", "compile_native", "counts", "reseed"]

_NAME = "torch_lms_random_pageouts"
_native: Any = None


def compile_native(folder: str | None = None) -> Any:
    """Compiles the module that listens, into a folder or where PyTorch keeps such modules, and loads it."""
    import torch.utils.cpp_extension  # wants setuptools, which a kit has not

    source = Path(__file__).with_suffix(".cpp")
    flags = ["-O1", "-DNDEBUG"]  # as PyTorch was built: classes have other members without
    return torch.utils.cpp_extension.load(_NAME, [str(source)], extra_cflags=flags, build_directory=folder)


def begin(seed: int = 0) -> None:
    """Pages out at random from now on, until the program ends."""
    global _native
    if _native is None:
        _native = importlib.import_module(_NAME) if importlib.util.find_spec(_NAME) else compile_native()
        _watch_addresses()
        os.register_at_fork(
            before=_native.before_fork,
            after_in_parent=_native.after_fork_in_parent,
            after_in_child=_native.after_fork_in_child,
        )
        atexit.register(_native.end)
    _native.begin(seed)


def reseed(seed: int) -> None:
    """From here on the choices are those of a seed."""
    _native.reseed(seed)


def counts() -> dict[str, int]:
    """What has happened so far: how often there was an occasion, what was asked for, and what the runtime did."""
    done = torch.cuda.swap.stats()
    names = ("pageouts", "pageout_bytes", "pageins", "passive_pageins", "prefetch_hits", "cancelled_pageouts")
    found = {"occasions": _native.times(), "requests": _native.requests(), **{name: done[name] for name in names}}
    failure = _native.failure()
    if failure:
        raise RuntimeError(f"expected every page-out to succeed or to be refused, found: {failure}")
    return found


# --- addresses that are given away ------------------------------------------------------------------


def _watch_addresses() -> None:
    _call_before(torch.Tensor, "numpy", _keep_tensor)
    _call_before(torch.Tensor, "data_ptr", _keep_tensor)
    _call_before(torch.Tensor, "__dlpack__", _keep_tensor)
    for module in (torch, torch.utils.dlpack):
        _call_before(module, "to_dlpack", _keep_tensor)
    _call_before(torch.UntypedStorage, "data_ptr", _keep_storage)
    _call_before(torch.UntypedStorage, "__getitem__", _keep_storage)
    for name in ("apply_", "map_", "map2_"):
        _hold_still_during(torch.Tensor, name)


def _keep_tensor(tensor: Any, *_: Any) -> None:
    if isinstance(tensor, torch.Tensor):
        _native.keep_tensor(tensor)


def _keep_storage(storage: Any, index: Any = slice(None)) -> None:
    if isinstance(index, slice):
        _native.keep_storage(storage._cdata)


def _call_before(owner: Any, name: str, before: Callable[..., None]) -> None:
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        before(*args)
        return function(*args, **kwargs)

    setattr(owner, name, wrapper)


def _hold_still_during(owner: Any, name: str) -> None:
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        _native.pause()
        try:
            return function(*args, **kwargs)
        finally:
            _native.resume()

    setattr(owner, name, wrapper)
