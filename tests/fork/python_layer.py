"""What the tests of torch_lms on the fork share; importing it leaves tests out where PyTorch is not the fork."""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("torch.cuda.swap") is None:
    pytest.skip("needs a PyTorch with the fork's patches", allow_module_level=True)
DEVICES = ["cpu"] if os.environ.get("TORCH_SWAP_CPU") == "1" else []
if torch.cuda.is_available():
    DEVICES.append("cuda")
if not DEVICES:
    pytest.skip("needs a GPU, or TORCH_SWAP_CPU=1", allow_module_level=True)

import torch_lms  # noqa: E402
from torch_lms import swap  # noqa: E402

PACKAGE_ROOT = Path(torch_lms.__file__).parents[1]
NBYTES = 64 << 10
STATES = {"resident", "out_queued", "paging_out", "paged_out", "in_queued", "paging_in"}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def settled() -> Iterator[None]:
    """Nothing is out and no environment is open, before and after; counters begin at zero."""
    torch_lms.stats(reset=True)
    yield
    if torch.cuda.swap.is_swap_env_open():
        torch.cuda.close_swap_env()
    gc.collect()
    assert torch_lms.stats().paged_out_storages == 0


def filled(device: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2**30, (NBYTES // 4,), dtype=torch.int32, generator=generator).to(device)


def is_filled(tensor: torch.Tensor, seed: int = 0) -> bool:
    return torch.equal(tensor.cpu(), filled("cpu", seed))


def paged_out(*tensors: torch.Tensor) -> None:
    assert torch_lms.pageout(*tensors) == len(tensors)
    torch_lms.wait()
    assert [swap.state(tensor) for tensor in tensors] == ["paged_out"] * len(tensors)


def check_message(error: BaseException, *parts: str) -> None:
    """Expected, found, do, and these texts."""
    text = str(error)
    assert 0 <= text.find("expected ") < text.find("found "), text
    assert all(part in text for part in parts), text


def run_python(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(PACKAGE_ROOT), **variables},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
