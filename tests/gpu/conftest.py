"""What every test on a GPU is given."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

GIB = 1 << 30
HERE = Path(__file__).parent


def why_not_here() -> str:
    """Why tests cannot page CUDA tensors here; empty if they can."""
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    from torch_lms._core import core

    return "" if core.has_cuda else "needs torch_lms built with CUDA: see the output of setup.py build_ext"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if item.path.is_relative_to(HERE)]
    why = why_not_here() if here else ""
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if why:
            item.add_marker(pytest.mark.skip(reason=why))


def clean() -> None:
    """No cached block, and no private pool that a graph has left, for which `enable` would refuse."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@pytest.fixture
def cleaned() -> Iterator[None]:
    """The allocator as in a new process, before and after."""
    clean()
    yield
    clean()


@pytest.fixture
def little_memory(cleaned: None) -> Iterator[None]:
    """The device seems to have 2 GiB, so that it is filled quickly."""
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(2 * GIB / total_bytes)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
