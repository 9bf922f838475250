"""The states in which a tensor's storage is found by an access, and what an access is seen to do."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch

import torch_lms
from torch_lms.swap import mlms

__all__ = ["STATES", "Place", "round_trip", "snapshot"]

Place = Callable[[Sequence[torch.Tensor]], None]


def _plain(tensors: Sequence[torch.Tensor]) -> None:
    """The control."""


def _paged_out(tensors: Sequence[torch.Tensor]) -> None:
    torch_lms.pageout(tensors)
    torch_lms.wait()


def _page_out_enqueued(tensors: Sequence[torch.Tensor]) -> None:
    torch_lms.pageout(tensors)


def _page_out_enqueued_behind_another(tensors: Sequence[torch.Tensor]) -> None:
    torch_lms.pageout(torch.ones(1 << 18, device=tensors[0].device if tensors else None))
    torch_lms.pageout(tensors)


def _prefetch_enqueued(tensors: Sequence[torch.Tensor]) -> None:
    _paged_out(tensors)
    torch_lms.prefetch(tensors)


def _prefetch_held(tensors: Sequence[torch.Tensor]) -> None:
    """The page-in queue stands still until the environment is closed, which the `paged` fixture does."""
    if not mlms._env_open:
        mlms.create_swap_env()
        mlms.prefetch_init()
    torch_lms.pageout(tensors)
    mlms.before_prefetch_wait_all()
    for tensor in tensors:
        mlms.need_prefetch(tensor)


def _prefetched(tensors: Sequence[torch.Tensor]) -> None:
    _paged_out(tensors)
    torch_lms.prefetch(tensors)
    torch_lms.wait()


def _copied(tensors: Sequence[torch.Tensor]) -> None:
    """They have come in, and the host keeps its copies until they are written: in automatic mode."""
    torch_lms.enable({str(tensors[0].device) if tensors else "cpu": "1GiB"}, min_bytes=1)
    _prefetched(tensors)


STATES: dict[str, Place] = {
    "plain": _plain,
    "paged_out": _paged_out,
    "page_out_enqueued": _page_out_enqueued,
    "page_out_enqueued_behind_another": _page_out_enqueued_behind_another,
    "prefetch_enqueued": _prefetch_enqueued,
    "prefetch_held": _prefetch_held,
    "prefetched": _prefetched,
    "copied": _copied,
}


def round_trip(tensors: Sequence[torch.Tensor]) -> int:
    """Pages out what may be paged out, waits; returns how many storages were refused."""
    refused = 0
    if mlms._env_open:
        mlms.close_swap_env()
    for tensor in tensors:
        try:
            torch_lms.pageout(tensor)
        except torch_lms.errors.PageoutError:
            refused += 1
    torch_lms.wait()
    return refused


def snapshot(value: Any) -> Any:
    """What can be compared with ``==``: of a tensor its dtype, shape and bits."""
    if isinstance(value, torch.Tensor):
        return _bits(value)
    if isinstance(value, (list, tuple)):
        return [snapshot(item) for item in value]
    if isinstance(value, dict):
        return {key: snapshot(item) for key, item in value.items()}
    if type(value).__module__ == "numpy":
        return (str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, float):
        return pickle.dumps(value)  # NaN equals NaN
    return value


def _bits(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach()
    if tensor.is_nested:
        return [_bits(part) for part in tensor.unbind()]
    if tensor.layout is torch.sparse_coo:
        return [_bits(tensor._indices()), _bits(tensor._values()), tuple(tensor.shape)]
    if tensor.layout is torch.sparse_csr:
        return [_bits(tensor.crow_indices()), _bits(tensor.col_indices()), _bits(tensor.values())]
    if tensor.is_quantized:
        return [_bits(tensor.int_repr()), tensor.q_scale(), tensor.q_zero_point()]
    dense = tensor.resolve_conj().resolve_neg().cpu().contiguous().clone()
    return (str(tensor.dtype), tuple(tensor.shape), bytes(dense.reshape(-1).view(torch.uint8).tolist()))
