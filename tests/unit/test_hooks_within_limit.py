"""What Python code allocates inside of an op: Note [Ops larger than the limit]."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch

from tests.unit.markers import counts_exactly

ELEMENTS = 1 << 16
BLOCK_BYTES = 4 * ELEMENTS


def large_sum() -> torch.Tensor:
    """30 blocks at once."""
    ones = torch.ones(10 * ELEMENTS)
    twos = ones + 1
    return (ones + twos).sum()


@pytest.fixture
def kernel() -> Iterator[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    library = torch.library.Library("torch_lms_hooks", "FRAGMENT")
    library.define("large_sum(Tensor one, Tensor other) -> Tensor")
    library.impl("large_sum", lambda one, other: large_sum(), "CPU")
    yield torch.ops.torch_lms_hooks.large_sum
    library._destroy()


@counts_exactly
@pytest.mark.parametrize("plans", [False, True])
@pytest.mark.parametrize("inside_of", ["a hook", "a kernel in Python"])
def test_what_is_allocated_inside_of_an_op_makes_the_limit_give_way_once(
    inside_of: str, plans: bool, paged: ModuleType, kernel: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    paged.enable(limit={"cpu": 31 * BLOCK_BYTES}, min_bytes=BLOCK_BYTES // 2, swap=plans, recompute=plans)
    one, other = torch.full((ELEMENTS,), 3.0), torch.full((ELEMENTS,), 2.0).requires_grad_()
    exceeded, beyond = [], []
    for _ in range(5):
        if inside_of == "a hook":
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (large_sum(), tensor), lambda kept: kept[1]):
                product = one * other
            product.sum().backward()
            assert torch.equal(other.grad, one)
            other.grad = None
        else:
            assert kernel(one, other.detach()).item() == 30 * ELEMENTS
        stats = paged.stats(reset=True)
        exceeded.append(stats.limit_exceeded)
        beyond.append(stats.peak_allocated_bytes > stats.limit_bytes)
    assert exceeded[0] > 0 or not beyond[0]
    assert (exceeded[1:], beyond[1:]) == ([0] * 4, [False] * 4)
