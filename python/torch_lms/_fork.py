"""The runtime of a PyTorch with the fork's patches, under the names of the compiled extension (``_C.pyi``).

There every access to a storage brings it back by itself, whoever makes it, so nothing has to be watched here: the
functions give the fork's operators (``csrc/fork/aten/src/ATen/native/StorageSwap.cpp``) the arguments and errors of
the extension's. What the fork does not have, plans above all, is refused in words.

Note [Whose environment it is]
    The fork pages while its one environment is open. Here it is opened by the first call that needs it, and closed when
    everything is paged in and no limit holds, unless the program has opened it by itself
    (``torch.cuda.create_swap_env``): then it is the program's to close.

Note [Operators that are no ops]
    The fork's functions are operators, and PyTorch shows operators to traces, to modes and to classes of tensors. A
    request to page is nothing of the program's: a trace has no place for it, and who watches ops may page by himself.
    So these calls are hidden where PyTorch can hide them, and a thread that has the lock may take it again: modes of
    functions, handlers of signals and finalizers come in between all the same.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import torch

from torch_lms import errors
from torch_lms._torch_compat import is_storage

__all__ = [
    "configure_host",
    "count_cpu_allocations",
    "disable",
    "enable",
    "has_cuda",
    "has_materializer",
    "hold_pageins",
    "in_forked_child",
    "is_complete",
    "is_here",
    "pagein_all",
    "pageout",
    "pin",
    "prefetch",
    "refuse",
    "shutdown",
    "start_pageins",
    "start_pageouts",
    "state",
    "stats",
    "total_bytes",
    "unpin",
    "wait_pageins",
    "wait_pageouts",
]

has_cuda: bool = torch.version.cuda is not None
has_materializer: bool = True  # raw access pages in: all access does

_operators: Any = torch.ops.storage_swap
_torch_c: Any = torch._C
# Held while storages are enqueued and while the environment opens or closes. See Note [Operators that are no ops].
_lock = threading.RLock()
_opening = 0  # the number of the opening that was made here
_host_limit_bytes = 0
_limited = False  # automatic mode is on
_orphaned = False

_ERRORS: dict[str, type[errors.LmsError]] = {
    "Error": errors.LmsError,
    "HostPoolFull": errors.HostPoolFullError,
    "PageoutRefused": errors.PageoutError,
    "SpillFailed": errors.SpillError,
}


def is_here() -> bool:
    """Whether the PyTorch that is imported has the fork's patches."""
    return importlib.util.find_spec("torch.cuda.swap") is not None


def is_complete() -> bool:
    """Whether they are those that this module was written for."""
    return all(hasattr(_operators, name) for name in ("set_limit", "take_error_kind", "times_opened"))


def refuse(what: str, instead: str) -> NoReturn:
    """Says that the fork has no such thing."""
    raise errors.LmsError(
        f"expected the extension of torch_lms for {what}, found the runtime of a PyTorch with the fork's patches "
        f"({torch.__version__}), which pages by hand and on demand alone; {instead}"
    )


# --- requests ---------------------------------------------------------------------------------------


def pageout(storages: Sequence[Any]) -> int:
    """Enqueues page-outs; those before one that is refused stay enqueued."""
    return _enqueue("pageout", storages)


def prefetch(storages: Sequence[Any], start: bool = True) -> int:
    """Enqueues page-ins, in a queue that runs or waits for `start_pageins`."""
    return _enqueue("prefetch", storages, start)


def state(storage: Any) -> str:
    """Where a storage is."""
    _check_not_forked()
    with _Hidden():
        tensor = _tensor(storage)
    try:
        return str(_call("state", tensor))
    except NotImplementedError:
        raise errors.PageoutError(
            f"expected a tensor with a storage, found one of layout {tensor.layout} or a wrapper; ask for the tensors "
            "it is made of (for a sparse tensor: tensor.indices() and tensor.values())"
        ) from None


def pin(storage: Any) -> None:
    """Keeps a storage on its device."""
    _pin("pin", storage)


def unpin(storage: Any) -> None:
    """Undoes one `pin`."""
    _pin("unpin", storage)


def _pin(operator: str, storage: Any) -> None:
    state(storage)  # raises for what has no storage
    with _Hidden():
        tensor = _tensor(storage)
    _call(operator, tensor)


def _enqueue(operator: str, storages: Sequence[Any], start: bool = False) -> int:
    _check_not_forked()
    if not storages:
        return 0
    with _Hidden():
        tensors = list(map(_tensor, storages))
    with _lock:
        if start:  # before anything is there: another thread may wait for it, which needs a queue that runs
            _call_open("prefetch_all")
        return sum(bool(_call_open(operator, tensor)) for tensor in tensors)


def _tensor(storage: Any) -> torch.Tensor:
    if isinstance(storage, torch.Tensor):
        return storage
    if is_storage(storage):
        untyped = getattr(storage, "_storage", storage)  # 1.12 and 1.13: of one with a type
        empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return empty.set_(untyped, 0, (0,), (1,))  # does not touch the bytes
    raise TypeError(
        f"expected a torch.Tensor or a torch.UntypedStorage, found {type(storage).__name__}; "
        "pass tensors, or lists of them"
    )


# --- queues -------------------------------------------------------------------------------------------


def start_pageouts() -> None:
    """Opens the environment."""
    _check_not_forked()
    with _open_environment():
        pass


def start_pageins() -> None:
    """Starts the queue of page-ins."""
    _check_not_forked()
    _call_open("prefetch_all")


def hold_pageins() -> None:
    """Waits for the page-ins under way; from now on prefetches wait for `start_pageins`."""
    _check_not_forked()
    _call_open("prefetch_init")


def wait_pageouts() -> None:
    """Waits until every page-out that is there now is over."""
    _check_not_forked()
    _call("wait_pending_pageouts")


def wait_pageins() -> None:
    """Waits until every page-in that is there now is over."""
    _check_not_forked()
    _call("wait_pending_pageins")


def pagein_all() -> None:
    """Brings everything to its device. See Note [Whose environment it is]."""
    _check_not_forked()
    with _lock:
        if not _limited and _call("is_open") and _call("times_opened") == _opening:
            _call("close_env")
        else:
            _call("pagein_all")


def shutdown() -> None:
    """Ends what is under way, at the end of the process; nobody learns of failures any more."""
    if in_forked_child() or not _call("is_open"):
        return
    for wait in ("wait_pageouts", "prefetch_init"):
        with suppress(RuntimeError):
            _call(wait)


@contextmanager
def _open_environment() -> Iterator[None]:
    global _opening
    with _lock:
        if not _call("is_open"):
            try:
                _call("create_env", _host_limit_bytes)
                _opening = _call("times_opened")
            except errors.LmsError:
                if not _call("is_open"):  # else the program has opened it meanwhile
                    raise
        yield


def _call_open(operator: str, *arguments: Any) -> Any:
    """Calls one that needs the environment, which is looked at only where that fails: a look is a call itself."""
    try:
        return _call(operator, *arguments)
    except RuntimeError:  # not all operators tell the kind
        if _call("is_open"):
            raise
    with _open_environment():
        return _call(operator, *arguments)


def _call(operator: str, *arguments: Any) -> Any:
    """Calls an operator of the fork; its errors become those of torch_lms."""
    function: Callable[..., Any] = getattr(_operators, operator)
    with _Hidden():
        try:
            return function(*arguments)
        except RuntimeError as error:
            kind = _ERRORS.get(_operators.take_error_kind())
            if kind is None or type(error) is not RuntimeError:  # PyTorch's own, and the kind is an earlier error's
                raise
            raise kind(str(error)) from None


class _Hidden:
    """What is called meanwhile is seen by no trace, mode of dispatch or class of tensors."""

    __slots__ = ("_functions", "_traced", "_undispatched")

    def __enter__(self) -> None:
        self._traced: Any = _torch_c._get_tracing_state()
        if self._traced is not None:
            try:
                _torch_c._set_tracing_state(None)
            except RuntimeError:  # in a mode of dispatch, where nothing is traced
                self._traced = None
        self._undispatched: Any = _torch_c._DisableTorchDispatch()  # until it is deleted
        self._functions: Any = _torch_c.DisableTorchFunction()
        self._functions.__enter__()

    def __exit__(self, *error: object) -> None:
        self._functions.__exit__(*error)
        del self._undispatched
        if self._traced is not None:
            _torch_c._set_tracing_state(self._traced)


# --- automatic mode -------------------------------------------------------------------------------------


def enable(device: str, limit_bytes: int, min_bytes: int) -> None:
    """Keeps a device within a limit: what no op has used for longest goes out. See ``SwapLimit.h``."""
    global _limited
    _check_not_forked()
    with _lock:
        if _call("is_open") and _call("times_opened") != _opening:
            raise errors.EnvError(
                "expected no open swap environment where automatic mode begins, found the program's own; call "
                "torch.cuda.close_swap_env() first: automatic mode opens one by itself"
            )
        with _open_environment():
            try:
                _call("set_limit", device, min(limit_bytes, _usable_bytes(device)), min_bytes)
            except RuntimeError as error:
                raise errors.LimitError(str(error)) from None
            _limited = True


def disable() -> None:
    """Ends all limits and brings everything to its device."""
    global _limited
    _check_not_forked()
    with _lock:
        _call("clear_limits")
        _limited = False
        pagein_all()


def _usable_bytes(device: str) -> int:
    """What a limit may be at most: PyTorch 1.13's allocator finds no room in pieces of free memory."""
    if device == "cpu":
        return total_bytes(device)
    free_bytes, _ = torch.cuda.mem_get_info(torch.device(device))
    return (free_bytes + torch.cuda.memory_reserved(device)) * 9 // 10


# --- host, devices, figures -----------------------------------------------------------------------------


def configure_host(limit_bytes: int, spill_dir: str) -> None:
    """Sets the limit of the host memory for paged-out bytes; 0 leaves it as it is."""
    global _host_limit_bytes
    if spill_dir:
        raise errors.LmsError(
            f"expected no spill_dir= with the fork's runtime, found {spill_dir!r}; its spill files, for tests, lie "
            "where the variable TMPDIR says at the start of the program"
        )
    if limit_bytes:
        _host_limit_bytes = limit_bytes
        _call("set_host_limit", limit_bytes)


def total_bytes(device: str) -> int:
    """The memory of a device; of the CPU, the control group's limit where that is less."""
    if device == "cpu":
        return int(_call("host_memory_bytes"))
    return int(torch.cuda.get_device_properties(torch.device(device)).total_memory)


def count_cpu_allocations() -> None:
    """Not in the fork."""
    refuse("counting the CPU's allocations", "use stock PyTorch 2.11 or later")


def stats(reset: bool = False) -> dict[str, int]:
    """The fork's counters, and CUDA's of the memory that tensors hold."""
    _check_not_forked()
    values = {str(name): int(value) for name, value in _call("stats", reset).items()}
    values.update((str(name), int(value)) for name, value in _call("limit_stats", reset).items())
    # What cannot happen: no access is served by the host copy, and nothing is dropped.
    values.update(host_served=0, dropped_bytes=0, allocation_retries=0)
    values.update(recomputable_bytes=0, recomputed_bytes=0, recomputations=0)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    values["allocated_bytes"] = sum(torch.cuda.memory_allocated(device) for device in devices)
    values["peak_allocated_bytes"] = sum(torch.cuda.max_memory_allocated(device) for device in devices)
    if reset:
        for device in devices:
            torch.cuda.reset_peak_memory_stats(device)
    return values


# --- forked children ------------------------------------------------------------------------------------


def in_forked_child() -> bool:
    """Whether this process was forked while the environment was open: its workers stayed behind."""
    return _orphaned


def _check_not_forked() -> None:
    if _orphaned:
        raise errors.LmsError(
            "expected the process that opened the swap environment, found a child forked from it; storages stay where "
            "they are in a forked child: start it with 'spawn' to page there"
        )


def _note_fork() -> None:
    global _orphaned
    _lock.release()
    _orphaned = _orphaned or bool(_call("is_open"))


if is_here():
    # A lock that another thread holds would be held for ever in the child.
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_note_fork)
