"""Under autocast an op that casts its tensors only calls others: what these make is made again, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import torch_lms
from tests.unit.fresh_process import in_fresh_process
from tests.unit.markers import counts_exactly
from tests.unit.planned_programs import Step, gradients_of
from tests.unit.test_dropout_recipes import PLANNED_WITHIN_S, made_again

ROWS, WIDTH, LAYERS = 1024, 64, 6


class Mixed(nn.Module):
    """Its product is an op that autocast has a kernel for, and that has kernels of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.sin(torch.bmm(x, self.weight)).float()


def training(*, enabled: bool = True) -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(*(Mixed() for _ in range(LAYERS)))

    def step(number: int) -> list[torch.Tensor]:
        torch.manual_seed(number)
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            loss = model(torch.randn(4, ROWS, WIDTH)).square().mean()
        loss.backward()
        return [loss.detach().clone(), *gradients_of(model)]

    return step


def without_autocast() -> Step:
    return training(enabled=False)


@counts_exactly
@pytest.mark.parametrize(("begin", "share"), [(training, 0.75), (without_autocast, 0.7)])  # too little for sums alone
def test_a_product_is_made_again_with_and_without_autocast(begin: Callable[[], Step], share: float) -> None:
    ops, equal = in_fresh_process(made_again, begin, False, share, within_s=PLANNED_WITHIN_S)
    assert ops.count("aten::bmm") > 1
    assert equal


def _random(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))


CASTING: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mm": lambda a, b: torch.mm(a[0], b[0]),
    "bmm": torch.bmm,
    "baddbmm": lambda a, b: torch.baddbmm(a, a, b),
    "addmm": lambda a, b: torch.addmm(a[0], a[0], b[0]),
    "cat": lambda a, b: torch.cat([a, b.bfloat16()]),
    "stack": lambda a, b: torch.stack([a, b.bfloat16()]),
    "index_copy": lambda a, b: torch.index_copy(a, 0, torch.tensor([1]), b[:1]),
    "attention": lambda a, b: nn.functional.scaled_dot_product_attention(a, b, b),
    "conv2d": lambda a, b: nn.functional.conv2d(a[:, None], b[:, None, :3, :3]),
    "loss": nn.functional.mse_loss,
}


@counts_exactly
@pytest.mark.parametrize("op", CASTING)
def test_an_op_that_casts_reads_what_is_paged_out(op: str) -> None:
    a, b = _random(4, 64, 64), _random(4, 64, 64) * 2
    run = CASTING[op]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = run(a, b)
        for away in ((a,), (b,), (a, b)):
            torch_lms.pageout(list(away))
            torch_lms.wait()
            assert torch_lms.stats().paged_out_storages == len(away)
            assert torch.equal(run(a, b), expected)
