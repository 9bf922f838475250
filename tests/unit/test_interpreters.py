"""Programs that have made a second interpreter, which paging takes no part in."""

from __future__ import annotations

import importlib
import sys

import torch

import torch_lms
from tests.unit.fresh_process import in_fresh_process

NUMEL = 1 << 16


def page_beside_another_interpreter() -> list[float]:
    """PyTorch lets go of Python's lock before its ops, in which paging waits. Its backward refuses to run here."""
    interpreters = importlib.import_module("_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters")
    other = interpreters.create()
    torch_lms.enable({"cpu": 20 * 4 * NUMEL}, min_bytes=1 << 12)
    tensors = [torch.full((NUMEL,), float(number)) for number in range(40)]
    found = [(tensor * 2).mean().item() for tensor in tensors]
    assert torch_lms.stats().pageouts > 0
    torch_lms.disable()
    interpreters.destroy(other)
    return found


def test_paging_beside_another_interpreter() -> None:
    assert in_fresh_process(page_beside_another_interpreter) == list(range(0, 80, 2))
