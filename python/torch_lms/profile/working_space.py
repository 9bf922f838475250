"""Measures the memory that a node needs while it runs, besides what it keeps: `working_space`.

On CUDA the allocator says what was there at most. Elsewhere the storages that ops made and that are alive are counted
whenever an op runs; what an op needs only inside of itself is not seen there. With PyTorch 1.12, where no mode sees all
ops, nothing is measured but on CUDA.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torch_lms._torch_compat import has_dispatch_modes, storage_bytes, storage_key, storage_weak_ref
from torch_lms.profile.alone import Alone, Prepared
from torch_lms.profile.preserving import is_lack_of_memory
from torch_lms.profile.storages import dense_parts, ones_for, tensor_bytes, tensors_in

__all__ = ["NOT_MEASURED", "WorkingSpace", "is_measurable", "working_space"]


class WorkingSpace(NamedTuple):
    """Bytes that a node needs at most; None where it was not measured.

    Attributes:
        forward_bytes: for its output and whatever else it makes in its forward, less what it keeps for its backward.
        backward_bytes: for the gradient of its output, that of its inputs and whatever else its backward makes.
        why: where the backward was not measured, what it raised.
    """

    forward_bytes: int | None
    backward_bytes: int | None
    why: str = ""


NOT_MEASURED = WorkingSpace(None, None)


class _Meter(AbstractContextManager["_Meter"], Protocol):
    """Counts bytes while it is entered.

    Attributes:
        peak_bytes: more than at the begin, at most.
        left_bytes: more at the end than at the begin.
    """

    peak_bytes: int
    left_bytes: int


class _CudaMeter:
    """What the caching allocator gave; it may have rounded up."""

    peak_bytes = left_bytes = 0

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> _CudaMeter:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._begin_bytes = torch.cuda.memory_allocated(self._device)
        return self

    def __exit__(self, *_reason: object) -> None:
        self.peak_bytes = torch.cuda.max_memory_allocated(self._device) - self._begin_bytes
        self.left_bytes = torch.cuda.memory_allocated(self._device) - self._begin_bytes


class _StorageMeter(TorchDispatchMode):
    """The storages that ops made under it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = self.left_bytes = 0
        self._storages: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage_key(part) for one in tensors_in((args, kwargs or {})) for part in dense_parts(one)}
        result = func(*args, **(kwargs or {}))
        for part in (part for one in tensors_in(result) for part in dense_parts(one)):
            if storage_key(part) not in given:
                self._storages[storage_key(part)] = storage_weak_ref(part), storage_bytes(part)
        self.peak_bytes = max(self.peak_bytes, self._count())
        return result

    def __exit__(self, *reason: Any) -> None:
        super().__exit__(*reason)  # type: ignore[no-untyped-call]
        self.left_bytes = self._count()

    def _count(self) -> int:
        self._storages = {key: one for key, one in self._storages.items() if not one[0].expired()}
        return sum(nbytes for _, nbytes in self._storages.values())


def _meter(device: torch.device) -> _Meter:
    return _CudaMeter(device) if device.type == "cuda" else _StorageMeter()


def is_measurable(device: torch.device) -> bool:
    """Whether there is a way to measure it on a device."""
    return device.type == "cuda" or has_dispatch_modes()


def working_space(device: torch.device, node: Alone) -> WorkingSpace:
    """Runs a node forward and, where its output needs a gradient, backward.

    Args:
        device: that the node runs on.
        node: what is measured.
    """
    if not is_measurable(device):
        return NOT_MEASURED
    run = Prepared(node)
    given = {storage_key(part) for one in run.given for part in dense_parts(one)}
    with _meter(device) as forward:
        output = run()
    parts = {storage_key(part): part for one in tensors_in(output) for part in dense_parts(one)}
    made_bytes = sum(storage_bytes(part) for key, part in parts.items() if key not in given)
    kept_bytes = max(forward.left_bytes - made_bytes, 0)
    roots = run.roots
    asked = [*node.values, *node.weights]
    if not roots or not asked:
        return WorkingSpace(forward.peak_bytes - kept_bytes, 0)
    gradients = [ones_for(one) for one in roots]
    try:
        with _meter(device) as backward:
            found = torch.autograd.grad(roots, asked, gradients, allow_unused=True)
    except Exception as error:
        # The model itself may run a part of it, or nothing where there is no derivative.
        if is_lack_of_memory(error):
            raise
        return WorkingSpace(forward.peak_bytes - kept_bytes, None, f"{type(error).__name__}: {error}")
    del found
    arrived_bytes = sum(map(tensor_bytes, gradients))
    return WorkingSpace(forward.peak_bytes - kept_bytes, arrived_bytes + backward.peak_bytes)
