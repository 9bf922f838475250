"""Threads that read and write parts of their own of the same storages: as if one had run after another.

Under `TORCH_LMS_CHAOS=1` what ops have made, and written to, is dropped meanwhile, and made again.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType

import pytest
import torch

from tests.unit.test_threads import page_out, together
from torch_lms.errors import PageoutError

ROWS, COLUMNS, STORAGES, OPS = 4, 3000, 3, 40
PROGRAMS = 40

Tensors = list[torch.Tensor]
WRITES: Sequence[Callable[[torch.Tensor, torch.Tensor], object]] = (
    lambda row, other: row.add_(1),
    lambda row, other: row.mul_(0.5),
    lambda row, other: row[17:99].sub_(2),
    lambda row, other: torch.nn.functional.relu_(row),
    lambda row, other: row.copy_(other),
    lambda row, other: row.masked_fill_(other > 1, 0.25),
    lambda row, other: row.addcmul_(other, other, value=0.125),
    lambda row, other: row.view(2, -1).t().add_(0.5),
    lambda row, other: row.clamp_(-4, 4),
    lambda row, other: other.add_(row),
    lambda row, other: torch.add(row, 1, out=other),
)
MAKES: Sequence[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = (
    lambda row, other: row * 2 + 1,
    lambda row, other: torch.tanh(other),
    lambda row, other: row.clone(),
    lambda row, other: torch.cat([row[:1000], other[1000:]]),
)


def run_row(shared: Tensors, row: int, seed: int) -> Tensors:
    """A program of one thread; what it has made in the end."""
    choose = random.Random(f"{seed} {row}")
    own = [torch.full((COLUMNS,), row + 1.0)]
    for _ in range(OPS):
        part, other = choose.choice(shared)[row], choose.choice(own)
        if choose.random() < 0.7:
            choose.choice(WRITES)(part, other)
        else:
            own = [*own[-4:], choose.choice(MAKES)(part, other)]
    return own


def made_by_ops() -> Tensors:
    whole = torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS) / 1000
    return [whole * (number + 1) for number in range(STORAGES)]


def run_together(paged: ModuleType, shared: Tensors, seed: int) -> list[Tensors]:
    """All rows at once, while storages go out."""
    choose, ended = random.Random(seed), threading.Semaphore(0)

    def page_until_all_have_ended() -> None:
        for _ in range(ROWS):
            while not ended.acquire(timeout=0):
                with contextlib.suppress(PageoutError):  # an op of another thread may be using it
                    page_out(paged, choose.choice(shared))

    def run(row: int) -> Tensors:
        try:
            return run_row(shared, row, seed)
        finally:
            ended.release()

    *found, _ = together(*(partial(run, row) for row in range(ROWS)), page_until_all_have_ended)
    return found


@pytest.mark.parametrize("first", range(0, 5 * PROGRAMS, PROGRAMS))
def test_programs_on_rows_of_the_same_storages_end_as_one_after_another(paged: ModuleType, first: int) -> None:
    for seed in range(first, first + PROGRAMS):
        shared, alone = made_by_ops(), made_by_ops()
        found = run_together(paged, shared, seed)
        expected = [run_row(alone, row, seed) for row in range(ROWS)]
        for one, other in zip([shared, *found], [alone, *expected], strict=True):
            assert all(torch.equal(left, right) for left, right in zip(one, other, strict=True)), seed
