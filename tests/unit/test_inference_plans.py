"""Inference within half of what it takes: plans come after a few passes, and only what is written is copied out."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

import torch_lms
from benchmarks.llama import Llama, LlamaShape
from tests.unit.markers import counts_exactly
from tests.unit.planned_programs import wait_for_planner
from tests.unit.trainings import MIN_BYTES, one_thread
from torch_lms._core import core

SHAPE = LlamaShape(layers=24, hidden=128, inner=344, heads=4, vocabulary=512)
BATCH, TOKENS, NEW = 4, 16, 16
LIMIT_SHARE = 0.55


@dataclass(frozen=True)
class Pass:
    """What one pass has moved, and whether it followed a plan."""

    logits: torch.Tensor
    out_bytes: int
    in_bytes: int
    share_in_step: float


@dataclass(frozen=True)
class Program:
    """A model with weights that stay as they are, and a cache that each pass writes."""

    model: Llama
    prompts: torch.Tensor

    def prefill(self) -> torch.Tensor:
        return self.model(self.prompts, 0)

    def decode(self, tokens: int) -> Iterator[torch.Tensor]:
        logits = self.prefill()
        yield logits
        for index in range(tokens):
            logits = self.model(logits.argmax(-1, keepdim=True), TOKENS + index)
            yield logits

    def prefills(self, times: int) -> Iterator[torch.Tensor]:
        for _ in range(times):
            yield self.prefill()


def made() -> Program:
    torch.manual_seed(0)
    model = Llama(SHAPE, batch=BATCH, tokens=TOKENS + NEW).requires_grad_(requires_grad=False)
    return Program(model, torch.randint(SHAPE.vocabulary, (BATCH, TOKENS)))


def measured(passes: Iterator[torch.Tensor]) -> list[Pass]:
    rows = []
    before = torch_lms.stats()
    for logits in passes:
        after = torch_lms.stats()
        out_bytes, in_bytes = after.pageout_bytes - before.pageout_bytes, after.pagein_bytes - before.pagein_bytes
        rows.append(Pass(logits.clone(), out_bytes, in_bytes, core.share_in_step()))
        wait_for_planner()
        before = torch_lms.stats()
    return rows


@pytest.fixture
def limits() -> tuple[int, int]:
    """A limit of a share of what the program takes, and what it takes beyond that, in bytes."""
    gc.collect()
    torch_lms.swap.count_cpu_allocations()
    held_bytes = torch_lms.stats(reset=True).allocated_bytes
    with torch.no_grad():
        made().prefill()
    needed_bytes = torch_lms.stats().peak_allocated_bytes - held_bytes
    limit_bytes = int(LIMIT_SHARE * needed_bytes)
    return held_bytes + limit_bytes, needed_bytes - limit_bytes


def same(passes: list[Pass], plain: list[Pass]) -> bool:
    return all(torch.equal(one.logits, other.logits) for one, other in zip(passes, plain, strict=True))


@counts_exactly
@one_thread()
@torch.no_grad()
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_a_program_without_backwards_follows_a_plan_from_its_sixth_pass_on(kind: str, limits: tuple[int, int]) -> None:
    def passes() -> Iterator[torch.Tensor]:
        program = made()
        return program.prefills(8) if kind == "prefill" else program.decode(8)

    plain = measured(passes())
    torch_lms.enable({"cpu": limits[0]}, min_bytes=MIN_BYTES)
    torch_lms.stats(reset=True)
    limited = measured(passes())
    assert same(limited, plain)
    first = 6 if kind == "prefill" else 7  # a prefill comes before the tokens
    assert [one.share_in_step for one in limited[first:]] == [1.0] * len(limited[first:])
    assert torch_lms.stats().peak_allocated_bytes <= limits[0]
    # What does not fit comes in once; the plan keeps a margin free, and may bring what the next pass needs.
    assert limited[-1].in_bytes < 1.5 * limits[1]


@counts_exactly
@one_thread()
@torch.no_grad()
def test_on_demand_only_what_does_not_fit_comes_in_and_nothing_goes_out(limits: tuple[int, int]) -> None:
    plain = measured(made().decode(NEW))
    torch_lms.enable({"cpu": limits[0]}, min_bytes=MIN_BYTES, swap=False, recompute=False)  # no plan can do that
    limited = measured(made().decode(NEW))
    assert torch_lms.current_plan() is None
    assert same(limited, plain)
    # The first pass writes everything; until the third the order of uses is not known.
    assert sum(one.out_bytes for one in limited[:1]) > 0
    assert [one.out_bytes for one in limited[3:]] == [0] * (NEW - 2)
    assert max(one.in_bytes for one in limited[3:]) < 1.5 * limits[1]
