"""Automatic mode while the autograd engine runs Python: recomputation, custom Functions."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

LIMIT_BYTES = 16 << 20
ELEMENTS = 1 << 18  # 1 MiB; 30 of them are kept


def chain(x: torch.Tensor) -> torch.Tensor:
    for _ in range(30):
        x = torch.sin(x)
    return x


class Wide(torch.autograd.Function):
    """Needs more than the limit in its backward, though never at once."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        kept = [grad + i for i in range(30)]
        return torch.stack([tensor.sum() for tensor in kept]).sum() * grad


def wide_forward(x: torch.Tensor) -> torch.Tensor:
    class Forward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            kept = [x + i for i in range(30)]
            return torch.stack([tensor.sum() for tensor in kept]).sum() * x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad

    return Forward.apply(x)


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(chain, id="eager"),
        pytest.param(Wide.apply, id="function_backward"),
        pytest.param(wide_forward, id="function_forward"),
        pytest.param(lambda x: checkpoint(chain, x, use_reentrant=True), id="checkpoint_reentrant"),
        pytest.param(
            lambda x: checkpoint(chain, x, use_reentrant=False),
            id="checkpoint_not_reentrant",
        ),
    ],
)
def test_program_that_fits_step_by_step_fits_the_limit(
    program: Callable[[torch.Tensor], torch.Tensor], paged: ModuleType
) -> None:
    def run() -> torch.Tensor:
        torch.manual_seed(0)
        x = torch.randn(ELEMENTS, requires_grad=True)
        program(x).sum().backward()
        assert x.grad is not None
        return x.grad

    plain = run()
    paged.enable(limit=LIMIT_BYTES, min_bytes=1 << 16)
    within = run()
    assert torch.equal(within, plain)
    assert paged.stats().peak_allocated_bytes <= LIMIT_BYTES
