"""Ranks whose stages give segments up: they train as ranks with room do, to the bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.stages.test_giving_up import HOST
from tests.stages.test_giving_up import Block as Residual
from torch_lms.partition import RecomputeAndSwap
from torch_lms.pipeline import train
from torch_lms.pipeline.torch_backend import is_available
from torch_lms.profile.profiler import ProfileConfig
from torch_lms.schedules.rules import ONE_STAGE_EACH
from torch_lms.stages import giving_up
from torch_lms.stages.giving_up import can_swap

WIDTH = 64
STEPS = 2
MICROBATCHES = 4


class Scored(nn.Module):
    """Residual blocks with dropout, behind a layer that widens what comes in unless it is wide; returns the loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        enter = [] if width == WIDTH else [nn.Linear(width, WIDTH)]
        self.blocks = nn.Sequential(*enter, *(Residual(WIDTH, counts=False) for _ in range(8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.blocks(x).square().mean()
        return loss


def batch(width: int) -> torch.Tensor:
    return torch.randn(2048, width, generator=torch.Generator().manual_seed(1))


class Replays:
    """PyTorch's checkpoint, which counts how often segments were computed again."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, segment: Callable[..., Any], *values: Any, use_reentrant: bool) -> Any:
        runs = 0

        def run(*values: Any) -> Any:
            nonlocal runs
            self.count += runs > 0
            runs += 1
            return segment(*values)

        return checkpoint(run, *values, use_reentrant=use_reentrant)


def trained(
    schedule: str, relief: RecomputeAndSwap, cap: int | None
) -> tuple[list[torch.Tensor], tuple[int, ...], int]:
    """Losses and parameters after some steps, the bytes that devices need, and how many segments were given up."""
    # A microbatch is a view of the batch, whose bytes the first stage so has once for each; few leave more to give up.
    width = 4 if schedule == "zero_bubble" else WIDTH
    replays = giving_up.checkpoint = Replays()  # type: ignore[assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # links between ranks are guessed
        pipeline = train(
            Scored(width),
            None,
            batch(width),
            schedule=schedule,
            microbatches=MICROBATCHES,
            optimizer=partial(torch.optim.SGD, lr=0.1),
            algorithm="uniform" if cap is None else "dp",
            seed=7,
            profile=ProfileConfig(timed_runs=1, progress=False),
            memory_cap_bytes=cap,
            relief=relief,
        )
    with pipeline:
        losses = [pipeline.step(batch(width)) for _ in range(STEPS)]
        states: list[dict[str, torch.Tensor]] = [{}] * dist.get_world_size()
        dist.all_gather_object(states, pipeline.state_dict())
    given_up = [len(one.recomputed) for one in pipeline.partition.stage_relief]
    expected = sum(
        # As partition counts them, but for the first stage: that has no inputs that need a backward of their own.
        count * MICROBATCHES * STEPS * (2 if schedule == "zero_bubble" and stage > 0 else 1)
        for stage, count in enumerate(given_up)
        if stage % len(states) == dist.get_rank()
    )
    assert replays.count == expected, (schedule, replays.count, given_up)
    merged = {name: value for state in states for name, value in state.items()}
    values = [loss for loss in losses if loss is not None] + [merged[name] for name in sorted(merged)]
    count = sum(len(one.recomputed) + len(one.swapped) for one in pipeline.partition.stage_relief)
    return values, pipeline.partition.device_memory_bytes, count


def relieved_ranks(rank: int, world: int) -> None:
    """Under every schedule."""
    schedules = ["gpipe", "1f1b", "interleaved", "zero_bubble"] if is_available() else ["gpipe", "1f1b"]
    for schedule in schedules:
        ways = [RecomputeAndSwap()]
        if can_swap():
            ways.append(RecomputeAndSwap(host_link=HOST, recompute=schedule == "zero_bubble"))
        # Less than plain cuts get along with. Zero bubble has all of some microbatches back at once, and gradients that
        # no relief makes fewer.
        share = 0.6 if schedule in ONE_STAGE_EACH else {"zero_bubble": 0.67}.get(schedule, 0.45)
        expected, need, nothing = trained(schedule, RecomputeAndSwap(), None)
        assert nothing == 0
        for relief in ways:
            found, taken, given_up = trained(schedule, relief, int(max(need) * share / 0.9))
            assert given_up > 0
            assert max(taken) <= share * max(need)
            assert len(found) == len(expected)
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)), schedule
            if rank == 0:
                print("equal", schedule, relief, given_up, flush=True)
