"""What differs between the versions of PyTorch, from 1.12 on, in one place.

Nothing here looks at version numbers: what is there is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn, overrides
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torch_lms.errors import ProfileError

if TYPE_CHECKING:
    from torch.amp import GradScaler
else:
    GradScaler = getattr(getattr(torch, "amp", None), "GradScaler", None) or torch.cuda.amp.GradScaler

__all__ = [
    "GradScaler",
    "all_gather_single",
    "ambient_modes",
    "function_mode",
    "grad_scaler_options",
    "has_dispatch_modes",
    "has_export",
    "is_storage",
    "named_parameters_with_ties",
    "reduce_scatter_single",
    "storage_bytes",
    "storage_key",
    "storage_weak_ref",
    "tree_flatten",
    "tree_map",
    "tree_unflatten",
    "untyped_storage",
]


_STORAGES = tuple(
    getattr(torch, name)
    for name in ("UntypedStorage", "TypedStorage", "_UntypedStorage", "_TypedStorage")
    if hasattr(torch, name)
)


def ambient_modes() -> tuple[Any, ...]:
    """What decides how ops run besides their arguments: gradients, inference and autocast of this thread."""
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *map(_autocast, ("cpu", "cuda"))


def _autocast(kind: str) -> Any:
    """The type that ops are cast to on a kind of device; None for none."""
    if hasattr(torch, "get_autocast_dtype"):
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    if kind == "cpu":
        return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
    return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None


def all_gather_single(whole: torch.Tensor, part: torch.Tensor, **options: Any) -> Any:
    """`torch.distributed.all_gather_single`, by whichever name it has."""
    new = getattr(torch.distributed, "all_gather_single", None)
    return (new or torch.distributed.all_gather_into_tensor)(whole, part, **options)


def reduce_scatter_single(part: torch.Tensor, whole: torch.Tensor, **options: Any) -> Any:
    """`torch.distributed.reduce_scatter_single`, by whichever name it has."""
    new = getattr(torch.distributed, "reduce_scatter_single", None)
    return (new or torch.distributed.reduce_scatter_tensor)(part, whole, **options)


def grad_scaler_options(device: torch.device) -> dict[str, Any] | None:
    """What makes a `GradScaler` one of a device; None where there is none for it."""
    if "device" in inspect.signature(GradScaler).parameters:
        return {"device": device.type}
    return {} if device.type == "cuda" else None


def is_storage(value: object) -> TypeGuard[torch.UntypedStorage]:
    """Whether something is a storage; one with a type will do."""
    return isinstance(value, _STORAGES)


def untyped_storage(tensor: torch.Tensor) -> Any:
    """The bytes behind a tensor.

    Raises:
        ProfileError: for a meta tensor, with PyTorch 1.12.
    """
    if hasattr(tensor, "untyped_storage"):
        return tensor.untyped_storage()
    try:
        return tensor.storage()._storage
    except NotImplementedError:
        raise ProfileError(
            f"expected a tensor whose storage Python can see, found one on the meta device with PyTorch "
            f"{torch.__version__}, which cannot tell; build the model on the CPU, or use PyTorch 2"
        ) from None


def storage_key(tensor: torch.Tensor) -> int:
    """Names a storage for as long as it, or a weak reference to it, lives; views have the key of their base."""
    return int(untyped_storage(tensor)._cdata)


def storage_bytes(tensor: torch.Tensor) -> int:
    """The size of the storage behind a tensor; the meta device's storages have a size, too."""
    return int(untyped_storage(tensor).nbytes())


def storage_weak_ref(tensor: torch.Tensor) -> Any:
    """Keeps a storage's key from being given to another storage, but does not keep its bytes."""
    return StorageWeakRef(untyped_storage(tensor))


def named_parameters_with_ties(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """All names of all parameters; a tied one comes under each of its names."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{prefix}.{name}" if prefix else name, parameter


def has_dispatch_modes() -> bool:
    """Whether a mode that sees all ops can be entered as it is; PyTorch 1.12 wants to make it itself."""
    return hasattr(TorchDispatchMode, "__enter__")


def has_export() -> bool:
    """Whether `torch.export` gives graphs that can be trained."""
    export = getattr(torch, "export", None)
    return hasattr(export, "export")


def tree_flatten(value: Any) -> tuple[list[Any], Any]:
    """Leaves of nested lists, tuples and dicts, and the structure that they were in."""
    leaves, spec = pytree.tree_flatten(value)
    return leaves, spec


def tree_unflatten(leaves: list[Any], spec: Any) -> Any:
    """The reverse of `tree_flatten`."""
    return pytree.tree_unflatten(leaves, spec)


def tree_map(function: Callable[[Any], Any], value: Any) -> Any:
    """Applies a function to all leaves of nested lists, tuples and dicts."""
    return pytree.tree_map(function, value)


def function_mode(call: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Hands every call of a function of PyTorch's Python interface to ``call(function, args, kwargs)`` instead.

    What ``call`` itself calls goes to PyTorch.
    """
    push = getattr(overrides, "push_torch_function_mode", None)
    if push is not None:  # 1.12: a mode is made with the one below it
        context: AbstractContextManager[Any] = push(partial(_FunctionMode, call))
        return context
    return _FunctionMode(call)


class _FunctionMode(overrides.TorchFunctionMode):
    """A mode that passes calls on."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call  # the base's own constructor differs between versions and does nothing

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._call(func, args, kwargs or {})
