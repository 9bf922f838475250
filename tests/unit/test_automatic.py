"""Automatic mode: trainings within a limit that is too small for them, bit for bit those without one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # PyTorch's own name for it
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import torch_lms
from tests.unit.trainings import (
    GPT,
    GPT_TRAINING,
    LARGE_STATE_TRAINING,
    MIN_BYTES,
    RESNET_TRAINING,
    RNN_TRAINING,
    TRAININGS,
    Batch,
    Training,
    one_thread,
    plain_step,
    same_bits,
    train,
)
from torch_lms.swap import SwapStats

Steps = Callable[[nn.Module, torch.optim.Optimizer, Batch], torch.Tensor]


def within_limit(run: Callable[[], list[torch.Tensor]], limit_bytes: int) -> tuple[list[torch.Tensor], SwapStats]:
    """What a run makes in automatic mode, and what paging did for it."""
    torch_lms.enable({"cpu": limit_bytes}, min_bytes=MIN_BYTES)
    torch_lms.stats(reset=True)
    made = run()
    stats = torch_lms.stats()
    torch_lms.disable()
    return made, stats


def check(run: Callable[[], list[torch.Tensor]], limit_bytes: int) -> None:
    """A run within a limit has paged, has kept the limit, and has changed no bit."""
    made, stats = within_limit(run, limit_bytes)
    assert same_bits(made, run())
    assert stats.pageouts > 0
    assert stats.pageins > 0
    assert stats.limit_bytes == limit_bytes
    assert stats.peak_allocated_bytes <= limit_bytes


# --- training ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", TRAININGS, ids=lambda training: training.name)
def test_training_within_a_limit_is_bit_equal(training: Training) -> None:
    check(partial(train, training, 4), training.limit_bytes)


def test_a_model_may_be_larger_than_the_limit_with_its_gradients_and_state() -> None:
    torch.manual_seed(0)
    model = LARGE_STATE_TRAINING.make()
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert 4 * parameter_bytes > 2 * LARGE_STATE_TRAINING.limit_bytes


def test_a_limit_that_is_never_reached_pages_nothing_out(paged: ModuleType, chaos: bool) -> None:
    made, stats = within_limit(partial(train, GPT_TRAINING), 1 << 30)
    assert same_bits(made, train(GPT_TRAINING))
    assert chaos or stats.pageouts == 0
    assert 0 < stats.peak_allocated_bytes < 1 << 30


def accumulating_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> torch.Tensor:
    optimizer.zero_grad(set_to_none=False)
    total = torch.zeros(())
    targets = batch[1].chunk(4)
    for part, target in zip(batch[0].chunk(4), targets, strict=True):
        loss = F.cross_entropy(model(part), target) / len(targets)
        loss.backward()
        total += loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return total


def autocast_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(batch[0]).float(), batch[1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def checkpoint_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, *, use_reentrant: bool
) -> torch.Tensor:
    assert isinstance(model, GPT)
    x = model.tokens(batch[0])
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=use_reentrant)
    loss = F.cross_entropy(model.head(x).flatten(0, 1), batch[1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def double_backward_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch[0]), batch[1])
    first, *_ = torch.autograd.grad(loss, next(model.parameters()), create_graph=True)
    (loss + first.square().sum()).backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize(
    ("training", "step", "limit_bytes"),
    [
        (RNN_TRAINING, accumulating_step, 3 << 20),
        (RESNET_TRAINING, autocast_step, 3 << 20),
        (GPT_TRAINING, autocast_step, 6 << 20),
        (GPT_TRAINING, partial(checkpoint_step, use_reentrant=True), 4 << 20),
        (GPT_TRAINING, partial(checkpoint_step, use_reentrant=False), 4 << 20),
        (LARGE_STATE_TRAINING, double_backward_step, 9 << 20),
    ],
    ids=["accumulation", "autocast resnet", "autocast gpt", "reentrant checkpoint", "checkpoint", "double backward"],
)
def test_other_ways_to_train_are_bit_equal(training: Training, step: Steps, limit_bytes: int) -> None:
    check(partial(train, training, 3, step), limit_bytes)


def test_checkpointed_sequences_are_bit_equal() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> torch.Tensor:
        assert isinstance(model, nn.Sequential)
        optimizer.zero_grad()
        loss = F.cross_entropy(checkpoint_sequential(model, 3, batch[0], use_reentrant=False), batch[1])
        loss.backward()
        optimizer.step()
        return loss.detach()

    check(partial(train, RESNET_TRAINING, 3, step), 3 << 20)


# --- other uses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, nullcontext])
def test_inference_within_a_limit_is_bit_equal(context: Callable[[], AbstractContextManager[object]]) -> None:
    @one_thread()
    def infer() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = LARGE_STATE_TRAINING.make().eval()
        with context():
            return [model(LARGE_STATE_TRAINING.batch(number)[0]).detach() for number in range(3)]

    check(infer, 3 << 20)


def test_training_and_evaluation_in_turn_with_changing_shapes_are_bit_equal() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> torch.Tensor:
        tokens, targets = batch
        length = 16 + int(tokens[0, 0])
        shorter = tokens[:, :length]
        model.train()
        loss = plain_step(model, optimizer, (shorter, targets.view_as(tokens)[:, :length].flatten()))
        model.eval()
        with torch.no_grad():
            return loss + model(tokens[: 1 + length % 8]).logsumexp(1).sum()

    check(partial(train, GPT_TRAINING, 6, step), GPT_TRAINING.limit_bytes)


def test_what_was_made_before_automatic_mode_is_used_bit_equal() -> None:
    @one_thread()
    def outcome(limit_bytes: int | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = GPT_TRAINING.make()
        optimizer = torch.optim.AdamW(model.parameters())
        losses = [plain_step(model, optimizer, GPT_TRAINING.batch(0))]
        if limit_bytes is not None:
            torch_lms.enable({"cpu": limit_bytes}, min_bytes=MIN_BYTES)
        losses += [plain_step(model, optimizer, GPT_TRAINING.batch(number)) for number in range(1, 4)]
        return [*losses, *model.state_dict().values()]

    made = outcome(4 << 20)
    assert torch_lms.stats().pageouts > 0
    torch_lms.disable()
    assert same_bits(made, outcome(None))


def test_a_new_training_after_one_that_was_within_a_limit_is_bit_equal() -> None:
    first, _ = within_limit(partial(train, RNN_TRAINING), RNN_TRAINING.limit_bytes)
    del first
    check(partial(train, RESNET_TRAINING), RESNET_TRAINING.limit_bytes)


# --- what stays ------------------------------------------------------------------------------------------------


def test_smaller_storages_than_min_bytes_stay() -> None:
    torch_lms.enable({"cpu": 8 << 20}, min_bytes=64 << 10)
    small = [torch.rand(16 << 8).add_(1) for _ in range(16)]
    just_less = torch.rand((16 << 10) - 1).add_(1)
    exactly = torch.rand(16 << 10).add_(1)
    states = set()
    for _ in range(3):
        large = [torch.rand(1 << 18).add_(1) for _ in range(12)]
        assert {torch_lms.swap.state(tensor) for tensor in (*small, just_less)} == {"resident"}
        states.add(torch_lms.swap.state(exactly))
        del large
    assert states & {"paged_out", "out_queued", "paging_out"}


def test_a_pinned_storage_stays_under_pressure() -> None:
    torch_lms.enable({"cpu": 8 << 20}, min_bytes=MIN_BYTES)
    tensor = torch.rand(1 << 18)
    torch_lms.pin(tensor)
    others = [torch.rand(1 << 18) for _ in range(12)]
    assert torch_lms.swap.state(tensor) == "resident"
    torch_lms.swap.unpin(tensor)
    assert torch_lms.stats().pageouts > 0
    del others
