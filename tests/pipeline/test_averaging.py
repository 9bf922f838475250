"""Gradients of replicas are averaged while backward still runs."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.pipeline.ranks import run_ranks
from torch_lms.errors import PipelineError
from torch_lms.pipeline import averaging
from torch_lms.pipeline.averaging import GradientAverages
from torch_lms.pipeline.config import PipelineConfig
from torch_lms.ranks.members import Members
from torch_lms.schedules.actions import Action

MEMBERS = Members(None, (0, 1), 0)
ONE = 4 * 5  # bytes of a weight
has_core = pytest.mark.skipif(find_spec("torch_lms._C") is None, reason="the compiled core is not built")
has_hooks = pytest.mark.skipif(
    not hasattr(torch.Tensor, "register_post_accumulate_grad_hook"), reason="gradients do not tell when they come"
)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["four_ranks", "failures", pytest.param("within_a_limit", marks=has_core)])
def test_ranks(scenario: str, tmp_path: Path) -> None:
    for ended in run_ranks(f"tests.pipeline.overlap_scenarios:{scenario}", 4, tmp_path):
        assert ended.status == 0, ended.output


class Sent:
    """What was given to an all-reduce of two replicas, of which the other one has all zeros."""

    def __init__(self) -> None:
        self.numels: list[int] = []
        self.ended = False

    def __call__(self, tensor: torch.Tensor, *, group: Any, async_op: bool) -> Any:
        self.numels.append(tensor.numel())
        return self

    def is_completed(self) -> bool:
        return self.ended

    def wait(self) -> None: ...


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    made = Sent()
    monkeypatch.setattr(dist, "all_reduce", made)
    return made


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.index = 0
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(5)) for _ in range(4))


def averages_of(stage: Any, bucket_bytes: int = ONE, microbatches: int = 1) -> GradientAverages:
    return GradientAverages(
        MEMBERS,
        [stage],
        torch.device("cpu"),
        microbatches=microbatches,
        bucket_bytes=bucket_bytes,
        last=(),
        without=(),
    )


def in_turn(stage: Weights) -> torch.Tensor:
    x = torch.ones(5)
    for weight in stage.weights:
        x = torch.sin(x * weight)
    return x.sum()


BACKWARD = Action(0, "B", 0)


@has_hooks
def test_a_bucket_begins_when_the_next_gradient_comes(sent: Sent) -> None:
    stage, seen = Weights(), []
    averages = averages_of(stage)
    for weight in stage.weights:
        weight.register_hook(lambda _: seen.append(len(sent.numels)))
    loss = in_turn(stage)
    averages.start()
    averages.begin(BACKWARD)
    loss.backward()
    assert seen == [0, 0, 1, 2]
    assert sent.numels == [6] * 3
    averages.end(BACKWARD)
    assert sent.numels == [6] * 4
    averages.finish()
    assert sent.numels == [6] * 4


@has_hooks
def test_what_hooks_of_the_program_make_of_a_gradient_is_averaged(sent: Sent) -> None:
    stage = Weights()
    averages = averages_of(stage)
    averages.start()

    def overwrite(one: torch.Tensor) -> None:
        assert one.grad is not None
        one.grad.fill_(8.0)

    for weight in stage.weights:
        weight.register_post_accumulate_grad_hook(overwrite)
    averages.begin(BACKWARD)
    in_turn(stage).backward()
    averages.end(BACKWARD)
    averages.finish()
    assert all(weight.grad is not None and weight.grad.eq(4.0).all() for weight in stage.weights)


@has_hooks
def test_buckets_begin_in_their_order_whichever_gradients_come_first(sent: Sent) -> None:
    """The last weight's comes last, so that all others wait for it."""
    stage = Weights()
    averages = averages_of(stage, 2 * ONE)
    first, *others = stage.weights[::-1]
    averages.start()
    averages.begin(BACKWARD)
    x = torch.sin(torch.ones(5) * first)
    for weight in others:
        x = torch.sin(x * weight)
    x.sum().backward()
    assert sent.numels == []
    averages.end(BACKWARD)
    assert sent.numels == [12] * 2


@has_hooks
def test_only_a_stage_s_last_backward_begins_averages(sent: Sent) -> None:
    stage = Weights()
    averages = averages_of(stage, microbatches=2)
    for _ in range(2):  # steps
        begun = []
        averages.start()
        for microbatch in range(2):
            for kind in "FB":
                averages.begin(Action(0, kind, microbatch))
                if kind == "B":
                    in_turn(stage).backward()
                begun.append(len(sent.numels))
                averages.end(Action(0, kind, microbatch))
        begun.append(len(sent.numels))
        assert begun == [0, 0, 0, 3, 4]
        averages.finish()
        sent.numels.clear()


def test_where_gradients_do_not_tell_when_they_come_averages_begin_after_them(
    sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(averaging, "_HOOK", "not there")
    stage = Weights()
    averages = averages_of(stage)
    averages.start()
    averages.begin(BACKWARD)
    in_turn(stage).backward()
    assert sent.numels == []
    averages.end(BACKWARD)
    assert sent.numels == [6] * 4


def test_types_and_sizes_have_buckets_of_their_own(sent: Sent) -> None:
    stage: Any = nn.Linear(3, 3)
    stage.index = 0
    stage.other = nn.Linear(3, 3, dtype=torch.float64)
    stage.large = nn.Parameter(torch.ones(1000))
    averages = averages_of(stage, bucket_bytes=100)
    averages.start()
    averages.end(BACKWARD)
    assert sorted(sent.numels) == [12 + 2, 12 + 2, 1000 + 1]
    averages.finish()
    assert all(one.grad is None for one in stage.parameters())


def test_what_has_ended_gives_its_memory_back_before_the_next_begins(sent: Sent) -> None:
    stage = Weights()
    averages = averages_of(stage)
    in_turn(stage).backward()
    averages.start()
    sent.ended = True
    averages.end(BACKWARD)
    assert len(averages._running) == 1


@has_hooks
def test_a_gradient_that_comes_after_its_average_began_is_an_error_and_the_next_step_works(
    sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints with use_reentrant=True each add a share of their own."""
    ended = []
    monkeypatch.setattr(averaging, "end_waits", lambda groups, device: ended.extend(groups))
    stage = Weights()
    averages = averages_of(stage)
    shared, between, start = stage.weights[3], stage.weights[2], torch.ones(5, requires_grad=True)

    def part(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x * shared)

    averages.start()
    averages.begin(BACKWARD)
    x = checkpoint(part, start, use_reentrant=True)
    checkpoint(part, x * between, use_reentrant=True).sum().backward()
    with pytest.raises(PipelineError, match=r"one gradient of weights\.3 in a backward.*use_reentrant=False"):
        averages.end(BACKWARD)
    averages.abandon()
    assert ended == [MEMBERS]
    averages.start()
    averages.begin(BACKWARD)
    in_turn(stage).backward()
    averages.end(BACKWARD)
    averages.finish()


def test_a_bucket_has_bytes() -> None:
    with pytest.raises(ValueError, match="bucket_bytes"):
        PipelineConfig(bucket_bytes=0)
