"""Runs a kind of access with its tensor in each place that a storage can be in, against a plain run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

import torch_lms
from tests.same_tensors import same_tensors

__all__ = ["PLACES", "check_access"]


def _leave(tensor: torch.Tensor) -> None:
    """Resident: the control."""


def _settle(tensor: torch.Tensor) -> None:
    torch_lms.pageout(tensor)
    torch_lms.wait()


def _race(tensor: torch.Tensor) -> None:
    torch_lms.pageout(tensor)


def _return(tensor: torch.Tensor) -> None:
    _settle(tensor)
    torch_lms.prefetch(tensor)


def _out_again(tensor: torch.Tensor) -> None:
    _return(tensor)
    torch_lms.pageout(tensor)


PLACES: dict[str, Callable[[torch.Tensor], None]] = {
    "resident": _leave,
    "paged_out": _settle,
    "on_its_way_out": _race,
    "on_its_way_in": _return,
    "out_again": _out_again,
}


def check_access(kind: Callable[[torch.Tensor], Any], place: str, device: str) -> None:
    """What the access returns, and what it leaves in the tensor, are those of a plain run."""
    plain_found, plain_left = _access(kind, _leave, device)
    found, left = _access(kind, PLACES[place], device)
    plain_leaves, leaves = pytree.tree_leaves(plain_found), pytree.tree_leaves(found)
    assert len(plain_leaves) == len(leaves)
    for expected, got in zip(plain_leaves, leaves, strict=True):
        if isinstance(expected, torch.Tensor):
            assert same_tensors([expected], [got])
        else:
            assert expected == got
    assert same_tensors([plain_left], [left])


def _access(
    kind: Callable[[torch.Tensor], Any], place: Callable[[torch.Tensor], None], device: str
) -> tuple[Any, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    tensor = torch.randn(8, 6, generator=generator).to(device, copy=True)
    alias = tensor.view(-1)
    place(tensor)
    found = kind(tensor)
    if tensor.untyped_storage().data_ptr() == alias.untyped_storage().data_ptr() and tensor.numel() == alias.numel():
        assert torch.equal(alias.view(tensor.shape), tensor)
    # What was written survives another round trip (storages that must stay do).
    try:
        _settle(tensor)
    except torch_lms.errors.PageoutError:
        torch_lms.wait()
    return found, tensor.clone()
