"""Optimizer steps and gradient clipping in pieces, where all tensors at once do not fit the limit.

Note [Optimizers in pieces]
    PyTorch's multi-tensor implementations, its default on CUDA, hand every tensor of a parameter group to one op
    after another. Each op needs all of its tensors on the device at once, and the next one needs others: where
    parameters, gradients and state exceed the limit together, each op pages everything out and in again, and waits
    for it. One tensor after the other moves the bytes once.

    Going over to the single-tensor implementation would change results: on CUDA, ``tensor / number`` multiplies by the
    reciprocal, which Adam's does, and ``_foreach_div_`` divides; on every device, that of ASGD, NAdam and RAdam orders
    its operations differently. So the implementation that PyTorch or the program has chosen stays, and is given the
    group in pieces. All of them take their tensors from one function, which groups them by device and dtype; what it
    gives them is cut. A piece is a small part of the limit, so that the next ones arrive meanwhile.

    Multi-tensor ops treat each tensor by itself, so the pieces give the same bits, with one exception: a kernel for
    lists is used only if it suits all tensors of the list, and one that does not sends all of them to the ops for one
    tensor. `_are_independent` says where the pieces would be treated as the whole is; other groups are left as they
    are.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils import clip_grad

__all__ = ["install", "uninstall"]

Tensors = Sequence[torch.Tensor | None]
Groups = dict[Any, tuple[Sequence[Tensors], list[int]]]
GroupTensors = Callable[..., Groups]

_GROUP_TENSORS = "_group_tensors_by_device_and_dtype"
_OWNERS: tuple[Any, ...] = (torch.optim.Optimizer, clip_grad)
_CALLERS = ("torch.optim.", "torch.nn.utils.")
_NATIVE = (torch.Tensor, torch.nn.Parameter)
_PIECES_OF_LIMIT = 64  # far less than what prefetches bring ahead

_lock = threading.Lock()
_wrapped: dict[Any, tuple[Any, GroupTensors]] = {}  # what the owner had, and what it has now
_limits_bytes: Mapping[str, int] = {}  # replaced, never changed: steps of other threads read it


def install(limits_bytes: Mapping[str, int]) -> None:
    """Cuts what exceeds a limit into pieces from now on. Called again, it changes the limits.

    Args:
        limits_bytes: of all devices, by their full names, ``cuda:0``.
    """
    global _limits_bytes
    with _lock:
        _limits_bytes = limits_bytes
        for owner in _OWNERS:
            before = vars(owner).get(_GROUP_TENSORS)  # private: a version may be without it
            if before is not None and owner not in _wrapped:
                wrapper = _wrap(getattr(owner, _GROUP_TENSORS))
                _wrapped[owner] = before, wrapper
                setattr(owner, _GROUP_TENSORS, staticmethod(wrapper) if isinstance(owner, type) else wrapper)


def uninstall() -> None:
    """Leaves optimizers and clipping to PyTorch alone. No effect when not installed."""
    global _limits_bytes
    with _lock:
        _limits_bytes = {}  # whoever still has the wrapper gets what PyTorch gives
        for owner, (before, wrapper) in _wrapped.items():
            if getattr(owner, _GROUP_TENSORS) is wrapper:
                setattr(owner, _GROUP_TENSORS, before)
        _wrapped.clear()


def _wrap(group_tensors: GroupTensors) -> GroupTensors:
    @functools.wraps(group_tensors)
    def wrapper(*args: Any, **kwargs: Any) -> Groups:
        groups = group_tensors(*args, **kwargs)
        if torch.compiler.is_compiling() or not _is_for_pytorch(sys._getframe(1).f_globals):
            return groups
        return _cut(groups, _limits_bytes)

    return wrapper


def _is_for_pytorch(caller: Mapping[str, Any]) -> bool:
    """Whether the caller is known to treat each tensor by itself; other people's optimizers may not."""
    return str(caller.get("__name__")).startswith(_CALLERS)


class _PieceKey(tuple[Any, ...]):
    """Device and dtype of a piece, which is not the same key as those of another piece."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def _cut(groups: Groups, limits_bytes: Mapping[str, int]) -> Groups:
    """The groups, with those cut that exceed the limit of their device."""
    cut: Groups = {}
    for key, (lists, indices) in groups.items():
        limit_bytes = limits_bytes.get(str(key[0]))
        if limit_bytes is None or _fits(lists, limit_bytes) or not _are_independent(lists):
            cut[key] = lists, indices
            continue
        for piece in _pieces(lists, limit_bytes // _PIECES_OF_LIMIT):
            cut[_PieceKey(key)] = [tensors[piece] for tensors in lists], indices[piece]
    return cut


def _fits(lists: Sequence[Tensors], limit_bytes: int) -> bool:
    """Whether all lists fit at once, with a temporary tensor for each of the first."""
    first = lists[0]
    elements = sum([tensor.numel() for tensor in first if tensor is not None])
    return elements * (_element_bytes(lists) + _element_bytes([first])) <= limit_bytes


def _element_bytes(lists: Sequence[Tensors]) -> int:
    """The bytes in all lists for one element of the first list's tensors; step counts are not worth counting."""
    elements = [tensors[0] for tensors in lists if tensors and tensors[0] is not None]
    return sum(tensor.element_size() for tensor in elements if tensor.numel() == elements[0].numel())


def _pieces(lists: Sequence[Tensors], piece_bytes: int) -> Iterator[slice]:
    """Neighbours of no more than ``piece_bytes`` together, or one tensor and its state."""
    element_bytes = _element_bytes(lists)
    start, held_bytes = 0, 0
    for index, tensor in enumerate(lists[0]):
        nbytes = element_bytes * (0 if tensor is None else tensor.numel())
        if index > start and held_bytes + nbytes > piece_bytes:
            yield slice(start, index)
            start, held_bytes = index, 0
        held_bytes += nbytes
    yield slice(start, len(lists[0]))


# --- what may be cut ----------------------------------------------------------------------------------------


def _are_independent(lists: Sequence[Tensors]) -> bool:
    """Whether each tensor is treated alike, whichever others are in the lists. See Note [Optimizers in pieces].

    So it is where every list has one kind of tensor, and the tensors of one parameter lie in memory alike. Missing
    tensors must be missing for all parameters: SGD begins its momentum only if none has any. Lists with one number
    for each parameter, such as step counts, are never alike with parameters, but for parameters that are numbers.
    """
    given: list[list[torch.Tensor]] = []
    for tensors in lists:
        present = [tensor for tensor in tensors if tensor is not None]
        if present and (len(present) < len(tensors) or not _are_of_one_kind(present)):
            return False
        if present:
            given.append(present)
    rows = list(zip(*given, strict=True))
    if not all(_is_dense(row[0]) and _lie_alike(*row) for row in rows):
        return False
    has_numbers = any(tensor.dim() < row[0].dim() and tensor.device == row[0].device for row in rows for tensor in row)
    return not has_numbers or all(row[0].dim() > 0 for row in rows)


def _are_of_one_kind(tensors: Sequence[torch.Tensor]) -> bool:
    dtype, device = tensors[0].dtype, tensors[0].device
    return all(
        type(tensor) in _NATIVE and tensor.layout is torch.strided and tensor.dtype is dtype and tensor.device == device
        for tensor in tensors
    )


def _lie_alike(parameter: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether gradient and state have the parameter's shape and strides, or are numbers."""
    shape, strides = parameter.shape, parameter.stride()
    return all(
        other.dim() == 0 or (other.shape == shape and (other.stride() == strides or _steps(other) == _steps(parameter)))
        for other in others
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill its memory, in whichever order, each once."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(_steps(tensor)):
        if stride != expected:
            return False
        expected *= size
    return True


def _steps(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Stride and size of each dimension in which there is a step to take."""
    return [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]
