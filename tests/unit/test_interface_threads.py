"""Threads with environments of their own, and threads that train within one limit."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

import torch

import torch_lms
from tests.unit.markers import counts_exactly
from tests.unit.trainings import (
    LARGE_STATE_TRAINING,
    MIN_BYTES,
    RESNET_TRAINING,
    RNN_TRAINING,
    Training,
    one_thread,
    plain_step,
    same_bits,
)
from torch_lms.errors import LmsError
from torch_lms.swap import SwapEnv

BLOCK_BYTES = 128 << 10


def run_threads(functions: Iterable[Callable[[], None]]) -> list[BaseException]:
    """Runs each in a thread of its own; what they raised."""
    raised: list[BaseException] = []

    def run(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_tensors_of_several_threads_keep_every_bit() -> None:
    wrong: list[int] = []

    def page(seed: int) -> None:
        tensor = torch.full((10_000,), float(seed))
        for count in range(50):
            with SwapEnv() as env:
                with suppress(LmsError):  # another thread waits
                    env.pageout(tensor)
                tensor.add_(1)
                env.prefetch(tensor)
            if not torch.equal(tensor, torch.full_like(tensor, float(seed + count + 1))):
                wrong.append(seed)

    assert run_threads(partial(page, seed) for seed in range(4)) == []
    assert wrong == []


@counts_exactly
def test_threads_that_run_against_the_limit_together_all_find_room() -> None:
    limit_bytes = 24 * BLOCK_BYTES
    torch_lms.enable({"cpu": limit_bytes}, min_bytes=MIN_BYTES)
    torch_lms.stats(reset=True)

    def hold_20_of_300() -> None:
        held: list[torch.Tensor] = []
        for count in range(300):
            held = [*held[-19:], torch.ones(BLOCK_BYTES // 4)]
            held[count % len(held)].add_(1)

    for _ in range(15):
        messages = [str(error) for error in run_threads([hold_20_of_300] * 3)]
        if messages:
            torch_lms.disable()
            raise torch.OutOfMemoryError(messages[0])
    assert torch_lms.stats().peak_allocated_bytes <= limit_bytes


Outcome = list[torch.Tensor]


@one_thread()
def continue_training(training: Training, model: torch.nn.Module, turn: threading.Lock, made: Outcome) -> None:
    """Trains a model that is there, a step at a turn, without random numbers; adds losses and parameters to ``made``.

    Turns keep what the test above is about out of this one.
    """
    optimizer = torch.optim.AdamW(model.parameters())
    for number in range(4):
        with turn:
            made.append(plain_step(model, optimizer, training.batch(number)))
    made += model.state_dict().values()


def test_threads_with_models_of_their_own_share_a_limit_and_are_bit_equal() -> None:
    trainings = [RESNET_TRAINING, RNN_TRAINING, LARGE_STATE_TRAINING]
    limit_bytes = 12 << 20
    turn = threading.Lock()
    torch.manual_seed(0)
    models = [training.make() for training in trainings]
    plain: list[Outcome] = [[] for _ in trainings]
    for training, model, made in zip(trainings, models, plain, strict=True):
        continue_training(training, copy.deepcopy(model), turn, made)
    torch_lms.enable({"cpu": limit_bytes}, min_bytes=MIN_BYTES)
    torch_lms.stats(reset=True)
    threaded: list[Outcome] = [[] for _ in trainings]
    raised = run_threads(
        partial(continue_training, training, model, turn, made)
        for training, model, made in zip(trainings, models, threaded, strict=True)
    )
    stats = torch_lms.stats()
    torch_lms.disable()
    assert raised == []
    assert all(same_bits(mine, others) for mine, others in zip(threaded, plain, strict=True))
    assert stats.pageouts > 0
    assert stats.peak_allocated_bytes <= limit_bytes
