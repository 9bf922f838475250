"""Each layer of paging, tried on a small tensor: is it here, and does it give the right bytes?

Only what is seen counts: each trial pages a tensor out, reaches its bytes in one way, and compares.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch

import torch_lms
from torch_lms._core import core, sees_every_access
from torch_lms.swap import state

__all__ = ["Trial", "try_layers"]

_COUNT = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One layer and what became of it.

    Attributes:
        what: the layer.
        found: in words.
        ok: False if it should work here and does not.
    """

    what: str
    found: str
    ok: bool


def try_layers(device: str) -> list[Trial]:
    """Tries every layer with a tensor on a device."""
    trials: list[tuple[str, Callable[[str], str]]] = [
        ("page-out and access by an op", _access_by_op),
        ("prefetch", _prefetch),
        ("page-out cancelled by an access", _cancel),
    ]
    if sees_every_access:
        trials.append(("access outside of ops", _access_raw))
    elif device == "cpu":
        trials.append(("raw read of the host copy", _read_host_copy))
        trials.append(("raw access outside of ops (materializer)", _access_raw))
    return [_attempt(what, trial, device) for what, trial in trials]


def _attempt(what: str, trial: Callable[[str], str], device: str) -> Trial:
    try:
        return Trial(what=what, found=trial(device), ok=True)
    except Exception as error:
        return Trial(what=what, found=f"{type(error).__name__}: {error}", ok=False)


def _paged_out(device: str) -> torch.Tensor:
    tensor = torch.arange(_COUNT, dtype=torch.float32, device=device)
    torch_lms.pageout(tensor)
    torch_lms.wait()
    _expect(tensor, "paged_out")
    return tensor


def _expect(tensor: torch.Tensor, expected: str) -> None:
    if (found := state(tensor)) != expected:
        raise torch_lms.errors.LmsError(f"expected the state {expected}, found {found}")


def _expect_sum(tensor: torch.Tensor) -> None:
    expected = _COUNT * (_COUNT - 1) / 2
    if (found := tensor.double().sum().item()) != expected:
        raise torch_lms.errors.LmsError(f"expected the sum {expected:.0f}, found {found:.0f}")


def _access_by_op(device: str) -> str:
    tensor = _paged_out(device)
    _expect_sum(tensor)
    _expect(tensor, "resident")
    return "ok"


def _prefetch(device: str) -> str:
    tensor = _paged_out(device)
    torch_lms.prefetch(tensor)
    torch_lms.wait()
    _expect(tensor, "resident")
    _expect_sum(tensor)
    return "ok"


def _cancel(device: str) -> str:
    tensor = torch.arange(_COUNT, dtype=torch.float32, device=device)
    torch_lms.pageout(tensor)
    _expect_sum(tensor)
    torch_lms.wait()
    return "ok"


def _read_host_copy(device: str) -> str:
    """Reads where nothing can notice: at the address that the storage has while it is paged out."""
    tensor = _paged_out(device)
    address = torch._C._data_address(tensor)  # type: ignore[attr-defined]
    last = ctypes.c_float.from_address(address + 4 * (_COUNT - 1)).value
    if last != _COUNT - 1:
        raise torch_lms.errors.LmsError(f"expected {_COUNT - 1}, found {last}")
    _expect(tensor, "paged_out")
    return "ok"


def _access_raw(device: str) -> str:
    """Asks C++ for the address, past the dispatcher and past what is watched in Python."""
    tensor = _paged_out(device)
    base = getattr(torch._C, "TensorBase", None) or torch._C._TensorBase
    base.data_ptr(tensor)
    if not core.has_materializer:
        _expect(tensor, "paged_out")
        return "not in this PyTorch (2.13 and later): such accesses use the host copy, right but slow"
    _expect(tensor, "resident")
    _expect_sum(tensor)
    return "ok"
