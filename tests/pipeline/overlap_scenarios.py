"""Two pipelines of two ranks each, whose gradients are averaged while backward still runs."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn

from tests.pipeline.beside_scenarios import EXECUTORS, groups_of
from tests.pipeline.scenarios import SharedByAll, cut
from torch_lms.errors import PipelineError
from torch_lms.pipeline import averaging
from torch_lms.pipeline.config import PipelineConfig
from torch_lms.pipeline.runner import Pipeline
from torch_lms.pipeline.torch_backend import SCHEDULES, is_available
from torch_lms.schedules.actions import BACKWARD, WEIGHT_BACKWARD

WIDTH, WIDE, ROWS, MICROBATCHES = 6, 128, 8, 4
SMALL = PipelineConfig(microbatches=MICROBATCHES, bucket_bytes=4 * WIDTH * (WIDTH + 1))  # of one layer
REPLICA = [0]  # of which a stage runs
HOOKS = hasattr(torch.Tensor, "register_post_accumulate_grad_hook")


class Deep(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


@fx.wrap
def in_the_first_replica(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * weight if REPLICA[0] == 0 else x


class Partly(Deep):
    """The first stage has a frozen weight, one that nothing uses, and one that only one replica uses."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.idle, self.one_sided = (nn.Parameter(torch.rand(WIDTH)) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(in_the_first_replica(x * self.frozen, self.one_sided))


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def half_of(replica: int) -> torch.Tensor:
    whole = torch.rand(2 * ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    return whole.chunk(2)[replica]


def configurations() -> Iterator[tuple[PipelineConfig, int]]:
    """Every schedule of every executor, with the number of stages."""
    for executor in EXECUTORS:
        for schedule in SCHEDULES if executor == "torch" else ("gpipe", "1f1b"):
            stages = 2 if schedule in ("gpipe", "1f1b") else 4
            yield replace(SMALL, schedule=schedule, executor=executor), stages


def add_up(reference: nn.Module, replica: int) -> dict[str, torch.Tensor]:
    """What one replica's gradients are before they are averaged."""
    mine, REPLICA[0] = REPLICA[0], replica
    for part in half_of(replica).chunk(MICROBATCHES):
        (reference(part) / MICROBATCHES).backward()
    REPLICA[0] = mine
    nothing = torch.zeros(WIDTH)
    return {
        name: nothing if one.grad is None else one.grad
        for name, one in reference.named_parameters()
        if one.grad is not None or name == "one_sided"
    }


def averages_of(pipeline: Pipeline) -> averaging.GradientAverages:
    assert pipeline._averages is not None
    return pipeline._averages


def gradients_of(pipeline: Pipeline) -> dict[str, torch.Tensor | None]:
    return {name: one.grad for stage in pipeline.stages for name, one in stage.named_parameters()}


@contextmanager
def written_down(pipeline: Pipeline) -> Iterator[list[Any]]:
    """What happens, in order: actions with whether they begin, and numbers of elements that are sent."""
    log: list[Any] = []
    timeline, reduce = pipeline._timeline, dist.all_reduce

    def noted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        log.append(tensor.numel())
        return reduce(tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeline, "begin", lambda action: log.append((action, True)))
        patch.setattr(timeline, "end", lambda action: log.append((action, False)))
        patch.setattr(dist, "all_reduce", noted)
        yield log


def check_means(pipeline: Pipeline, halves: list[nn.Module]) -> None:
    """A step's gradients are the mean of those of one process that adds up each half, bit for bit."""
    first, second = (add_up(reference, replica) for replica, reference in enumerate(halves))
    means = {name: first[name] / 2 + second[name] / 2 for name in first}
    for reference in halves:
        for name, one in reference.named_parameters():
            one.grad = means[name].clone() if name in means else None
    for name, found in gradients_of(pipeline).items():
        assert (found is None) == (name not in means), name
        assert found is None or torch.equal(found, means[name]), (pipeline.config, name)


def check_order(pipeline: Pipeline, log: list[Any]) -> None:
    """A stage's first bucket begins within its last backward, its last one right after it; all do under zero bubble."""
    first = next(place for place, what in enumerate(log) if not isinstance(what, int))  # PyTorch 2.15 sums before it
    sent = [place for place, what in enumerate(log) if isinstance(what, int) and place > first]
    buckets = {stage.index: len(averages_of(pipeline)._buckets_of(stage.index)) for stage in pipeline.stages}
    assert len(sent) == sum(buckets.values()), log
    for stage, count in buckets.items():
        assert count > 1
        ended = max(
            place
            for place, what in enumerate(log)
            if not isinstance(what, int)
            and (what[0].stage, what[1]) == (stage, False)
            and what[0].kind in (BACKWARD, WEIGHT_BACKWARD)
        )
        action = log[ended][0]
        begun = log.index((action, True))
        within = [place for place in sent if begun < place < ended]
        after = [place for place in sent if ended < place <= ended + count]
        assert len(within) + len(after) == count, (pipeline.config, stage, log)
        assert bool(within) == (HOOKS and action.kind == BACKWARD), (pipeline.config, stage, log)
        assert after


def every_schedule(rank: int, world: int) -> None:
    """Two steps without a zero_grad between them; of a weight that one replica uses, both get half of the gradient."""
    pp, dp = groups_of(rank, world)
    REPLICA[0] = rank % 2
    for config, stages in configurations():
        model = seeded(Partly)
        halves = [copy.deepcopy(model) for _ in range(2)]
        with Pipeline(cut(model, stages), group=pp, data_parallel=dp, config=config) as pipeline:
            for _ in range(2):
                with written_down(pipeline) as log:
                    pipeline.step(half_of(rank % 2))
                check_means(pipeline, halves)
                check_order(pipeline, log)
        if rank == 0:
            print("equal", config.schedule, config.executor, flush=True)


def weights_that_stages_share(rank: int, world: int) -> None:
    """They are averaged after the stages have added up theirs, the others meanwhile; steps add up."""
    pp, dp = groups_of(rank, world)
    x = torch.rand(2 * ROWS, 4, generator=torch.Generator().manual_seed(1))
    for schedule in ("1f1b", "interleaved") if is_available() else ("1f1b",):
        model = seeded(SharedByAll)
        reference = copy.deepcopy(model)
        stages = 2 if schedule == "1f1b" else 4
        config = replace(SMALL, schedule=schedule, bucket_bytes=16)
        with Pipeline(cut(model, stages), group=pp, data_parallel=dp, config=config) as pipeline:
            for _ in range(2):
                pipeline.step(x.chunk(2)[rank % 2])
                for part in x.chunk(2 * MICROBATCHES):
                    (reference(part) / (2 * MICROBATCHES)).backward()
            for name, found in gradients_of(pipeline).items():
                torch.testing.assert_close(found, reference.get_parameter(name).grad)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, WIDTH, sparse=True)
        self.deep = Deep()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.deep(self.embed(ids))
        return loss


def sparse_gradients_are_refused(rank: int, world: int) -> None:
    pp, dp = groups_of(rank, world)
    pipeline = Pipeline(cut(seeded(Sparse), 2), group=pp, data_parallel=dp, config=SMALL)

    def train() -> None:
        while True:  # the second stage has nothing to refuse, and hears of it in its first step or at the next one
            pipeline.step(torch.arange(ROWS) % 5)

    with pytest.raises(PipelineError, match=r"dense gradient of torch.float32 for embed.weight.*sparse=False"):
        train()


def fails_in_its_last_backward(rank: int, world: int) -> None:
    """Its averages that wait for the other replica end at once; the others hear of it, and have no next step."""
    pp, dp = groups_of(rank, world)
    store = dist.distributed_c10d._get_default_store()
    config = replace(SMALL, executor="own")  # PyTorch wraps what fails in a backward
    pipeline = Pipeline(cut(seeded(Deep), 2), group=pp, data_parallel=dp, config=config)
    pipeline.step(half_of(rank % 2))
    came: list[torch.Tensor] = []
    works: list[Any] = []

    def in_last(gradient: torch.Tensor) -> None:
        came.append(gradient)
        if len(came) == MICROBATCHES:
            works.extend(one.work for one in averages_of(pipeline)._running)
            raise ArithmeticError("no more numbers")

    if rank == 3:
        next(pipeline.parameters()).register_hook(in_last)
    if rank == 2:
        store.wait(["ended"])  # before it begins the step
    expected = (ArithmeticError, "no more numbers") if rank == 3 else (PipelineError, "rank 3 failed")
    with pytest.raises(expected[0], match=expected[1]):
        pipeline.step(half_of(rank % 2))
    assert not averages_of(pipeline)._running
    if rank == 3:
        assert works or not HOOKS
        while not all(one.is_completed() for one in works):
            time.sleep(0.05)
        store.set("ended", "")
    with pytest.raises(PipelineError, match="rank 3 failed"):
        pipeline.step(half_of(rank % 2))


def within_a_limit(rank: int, world: int) -> None:
    """Under automatic mode, whose limit has no room for weights beside gradients and their sums: the same bits."""
    import torch_lms

    pp, dp = groups_of(rank, world)
    model, x = seeded(partial(Deep, WIDE)), torch.rand(ROWS, WIDE, generator=torch.Generator().manual_seed(rank % 2))
    config = replace(SMALL, bucket_bytes=4 * WIDE * (WIDE + 1))

    def gradients(steps: int) -> dict[str, torch.Tensor]:
        with Pipeline(cut(copy.deepcopy(model), 2), group=pp, data_parallel=dp, config=config) as pipeline:
            for _ in range(steps):
                pipeline.step(x)
            return {name: one.clone() for name, one in gradients_of(pipeline).items() if one is not None}

    expected = gradients(steps=3)
    gc.collect()
    torch_lms.swap.count_cpu_allocations()
    held_bytes = sum(one.numel() * one.element_size() for one in expected.values())
    torch_lms.enable({"cpu": torch_lms.stats().allocated_bytes + held_bytes * 3 // 2}, min_bytes=1 << 12)
    found = gradients(steps=3)
    assert torch_lms.stats().pageout_bytes > 0
    torch_lms.disable()
    assert found.keys() == expected.keys()
    for name, one in found.items():
        assert torch.equal(one, expected[name]), name


def four_ranks(rank: int, world: int) -> None:
    every_schedule(rank, world)
    weights_that_stages_share(rank, world)


def failures(rank: int, world: int) -> None:
    fails_in_its_last_backward(rank, world)
    sparse_gradients_are_refused(rank, world)
