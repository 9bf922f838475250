"""Python's own ways to a storage's raw memory, watched while paging is on.

Note [Ways around the dispatcher]
    numpy, DLPack and ``__cuda_array_interface__`` (CuPy, Numba) hand an address out for good: the storage is pinned
    for the rest of its life.
    ``data_ptr`` hands it out for a call (Triton's launcher does this for every argument), and
    ``resize_`` frees the memory without an op: the storage is paged in and any page-out of it is
    called off. A compiled graph runs kernels on its inputs' addresses; ``apply_``, ``map_`` and ``map2_`` call Python
    while they go through addresses; what reads and writes files goes through addresses and may call a file that is
    Python's own, while other threads go on: what these are given stays until they end.
    ``allow_mutation_on_saved_tensors`` finds what an op writes to among what was saved, by address; that changes
    where a storage went out and came back, and so it is told which storage it is instead. What was saved before
    it is told so would not be found: paging does not begin inside of it.
    From torch 2.13 on the core notices raw mutable access to paged-out storages by itself; these
    wrappers also cover 2.11 and 2.12, and addresses of resident storages. The fork's runtime notices
    every access, and pages out only what the program names: there, none of this is installed.

Note [Threads that begin]
    While automatic mode sleeps no op is watched (csrc/extension/policy/Wakefulness.h, Note [Learn, sleep, arm]): that
    is right for one thread alone. So it is woken before another one of Python's begins.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import graph

from torch_lms._core import core, sees_every_access
from torch_lms.errors import EnvError

__all__ = ["install"]

_WATCHED = "_torch_lms_watched"
_FILE_FUNCTIONS = (
    (torch._C.PyTorchFileWriter, "write_record"),
    (torch.UntypedStorage, "_write_file"),
    (torch.UntypedStorage, "_set_from_file"),
)
_lock = threading.Lock()
_installed = False


def install() -> None:
    """Watches from now on. No effect when called again; safe in any thread.

    Raises:
        EnvError: inside of ``allow_mutation_on_saved_tensors``, unless it was called before.
    """
    global _installed
    if _installed or sees_every_access:
        return
    with _lock:
        if _installed:
            return
        if getattr(graph, "_allow_mutation_on_saved_tensors_enabled", False):
            raise EnvError(
                "expected no torch.autograd.graph.allow_mutation_on_saved_tensors around the first call of torch_lms, "
                "found one; page something or call enable() before it is entered"
            )
        from torch._inductor.output_code import CompiledFxGraph  # first: it may fail, or be interrupted

        _wrap_pinned(torch.Tensor, "numpy")
        _wrap_pinned(torch.Tensor, "__dlpack__")
        _wrap(torch.Tensor, "share_memory_", _use)
        _wrap(torch.Tensor, "data_ptr", _use)
        _wrap(torch.UntypedStorage, "data_ptr", _use)
        _wrap(torch.UntypedStorage, "resize_", _use)
        _wrap(torch.UntypedStorage, "share_memory_", _use)
        _wrap_slices_of_storages()
        _watch_exports()
        _wrap_property(torch.Tensor, "__cuda_array_interface__", _pin)
        _wrap_held(CompiledFxGraph, "__call__", _hold_inputs)
        for name in ("apply_", "map_", "map2_"):
            _wrap_held(torch.Tensor, name, _hold_arguments)
        for owner, name in _FILE_FUNCTIONS:
            _wrap_held(owner, name, _hold_arguments)
        for name in ("save", "save_to_buffer", "_save_for_mobile", "_save_to_buffer_for_mobile"):
            _wrap_held(torch._C.ScriptModule, name, _hold_script_module)
        for name in ("_get_sid", "_get_tid"):  # private: a version may be without them
            if hasattr(graph, name):
                _wrap_identity(name)
        _wrap_exchange()
        _wrap(threading.Thread, "start", _wake)
        _installed = True


def _pin(owner: Any) -> bool:
    """Whether there was something to pin."""
    if movable := _movable(owner):
        core.pin(owner)
    return movable


def _pinned(owner: Any, hand_out: Callable[[], Any]) -> Any:
    """Pinned before the address is taken; not for good where none is handed out."""
    movable = _pin(owner)
    try:
        return hand_out()
    except BaseException:
        if movable:
            core.unpin(owner)
        raise


def _use(owner: Any) -> None:
    if _movable(owner):
        core.use([owner])


def _wake(_: threading.Thread) -> None:
    """See Note [Threads that begin]. No effect unless automatic mode sleeps."""
    if not core.in_forked_child():
        core.wake()


def _movable(owner: Any) -> bool:
    """Whether there is a storage at all that could move; in a forked child none does.

    The core asks: attributes of a tensor would be asked of its class's ``__torch_function__``.
    """
    return core.movable(owner)


def _replace(owners: Sequence[Any], name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Puts a wrapper around a function that is found under a name in several places; once, if called again.

    An `install` may have been interrupted: the last place is looked at, so that the others have it by then.
    """
    function = getattr(owners[-1], name)
    if not hasattr(function, _WATCHED):
        wrapper = functools.wraps(function)(wrap(function))
        setattr(wrapper, _WATCHED, True)
        for owner in owners:
            setattr(owner, name, wrapper)


def _wrap(owner: type, name: str, before: Callable[[Any], None]) -> None:
    """Calls ``before(self)`` in front of a method."""

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            before(self)
            return method(self, *args, **kwargs)

        return wrapper

    _replace([owner], name, wrap)


def _wrap_pinned(owner: type, name: str) -> None:
    """A method that hands its tensor's address out for good."""

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            return _pinned(self, functools.partial(method, self, *args, **kwargs))

        return wrapper

    _replace([owner], name, wrap)


def _wrap_property(owner: type, name: str, after: Callable[[Any], object]) -> None:
    """Calls ``after(self)`` where a property has a value; where it raises there is none to be used."""

    def get(self: Any) -> Any:
        value = found.fget(self)
        after(self)
        return value

    found = vars(owner)[name]
    if not hasattr(found.fget, _WATCHED):
        setattr(get, _WATCHED, True)
        setattr(owner, name, property(get, doc=found.__doc__))


def _hold_inputs(_: Any, inputs: Sequence[Any]) -> Any:
    return _hold_arguments(*inputs)


def _hold_arguments(*args: Any) -> Any:
    owners = [owner for owner in args if _movable(owner)]
    return core.hold(owners) if owners else None


def _hold_script_module(module: Any, *_: Any) -> Any:
    return None if core.in_forked_child() else core.hold_script_module(module)


def _wrap_held(owner: type, name: str, hold: Callable[..., Any]) -> None:
    """What ``hold`` finds in a method's arguments stays where it is until the method ends."""

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            held = hold(*args)
            try:
                return method(*args, **kwargs)
            finally:
                del held  # it may go again

        return wrapper

    _replace([owner], name, wrap)


def _wrap_identity(name: str) -> None:
    """What saved tensors that may be written are found by: something, the address and the version."""

    def wrap(identify: Callable[[torch.Tensor], tuple[Any, ...]]) -> Callable[[torch.Tensor], tuple[Any, ...]]:
        def wrapper(tensor: torch.Tensor) -> tuple[Any, ...]:
            *others, address, version = identify(tensor)
            if address == 0:
                return (*others, address, version)
            storage = tensor.untyped_storage()
            return (*others, (storage._cdata, address - storage.data_ptr()), version)

        return wrapper

    _replace([graph], name, wrap)


def _wrap_exchange() -> None:
    """See Note [DLPack's table of functions] in csrc/extension/bind_exchange.h."""
    table = torch.Tensor.__dict__.get("__dlpack_c_exchange_api__")
    if table is not None:
        torch.Tensor.__dlpack_c_exchange_api__ = core.watch_exchange(table)


def _wrap_slices_of_storages() -> None:
    """A slice of a storage is another storage on the same memory."""

    def wrap(get: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(self: torch.UntypedStorage, index: Any) -> Any:
            if isinstance(index, slice):
                return _pinned(self, lambda: get(self, index))
            _use(self)
            return get(self, index)

        return wrapper

    _replace([torch.UntypedStorage], "__getitem__", wrap)


def _watch_exports() -> None:
    """See Note [Functions that are found early] in csrc/extension/bind_exchange.h."""
    core.watch_exports(torch._C._to_dlpack, torch._C._to_dlpack_versioned)
