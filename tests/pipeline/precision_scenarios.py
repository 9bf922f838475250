"""Pipelines under autocast: what crosses borders, the loss scale of float16, overflows, evaluation."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from tests.pipeline.beside_scenarios import EXECUTORS, PROFILE, cut, groups_of, plain_model
from torch_lms._torch_compat import GradScaler, grad_scaler_options
from torch_lms.errors import PipelineError
from torch_lms.pipeline import Pipeline, PipelineConfig, TrainingPipeline, train

CPU = torch.device("cpu")
STEPS = 4
optimize = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def batch(step: int) -> torch.Tensor:
    return torch.rand(8, 8, generator=torch.Generator().manual_seed(step))


def distance(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(out.float(), target)


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return plain_model()


class SingleDevice:
    """What one process does with torch.autocast and GradScaler alone."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, growth_interval: int = 2000) -> None:
        self.model, self.dtype = copy.deepcopy(model), dtype
        self.optimizer = optimize(self.model.parameters())
        self.scaler = GradScaler("cpu", enabled=dtype is torch.float16, growth_interval=growth_interval)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=self.dtype):
            return distance(self.model(x), -x)

    def backward(self, x: torch.Tensor, microbatches: int) -> torch.Tensor:
        losses = []
        for part in x.chunk(microbatches):
            loss = self.forward(part) / microbatches if microbatches > 1 else self.forward(part)
            self.scaler.scale(loss).backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


def make(model: nn.Module, dtype: torch.dtype, **options: Any) -> TrainingPipeline:
    options = {"optimizer": optimize, "loss": distance, "profile": PROFILE, "algorithm": "uniform", **options}
    return train(copy.deepcopy(model), options.pop("group", None), batch(0), autocast=dtype, **options)


def everyones(value: Any) -> list[Any]:
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, value)
    return told


def state_of(pipeline: Pipeline) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in pipeline.state_dict().items()}


def check_same(found: Pipeline, expected: nn.Module) -> None:
    values = expected.state_dict()
    for name, value in found.state_dict().items():
        assert torch.equal(value, values[name]), name


def has_float16() -> bool:
    return grad_scaler_options(CPU) is not None


# --- as one process does --------------------------------------------------------------------------------------


def as_one_process_does(rank: int, world: int) -> None:
    """Losses, parameters and scale to the bit, while the scale grows with every second step."""
    cases: Sequence[tuple[torch.dtype, str, str, int]] = [
        (torch.bfloat16, "1f1b", "own", 1),
        *((torch.float16, "1f1b", executor, count) for executor in EXECUTORS for count in (1, 2)),
        *([(torch.float16, "zero_bubble", "torch", 2)] if "torch" in EXECUTORS else []),
    ]
    for dtype, schedule, executor, microbatches in cases:
        if dtype is torch.float16 and not has_float16():
            continue
        model = model_of()
        alone = SingleDevice(model, dtype, growth_interval=2)
        options = {"schedule": schedule, "executor": executor, "microbatches": microbatches}
        with make(model, dtype, **options) as pipeline:
            assert (pipeline.scaler is None) == (dtype is torch.bfloat16)
            if pipeline.scaler is not None:
                pipeline.scaler.set_growth_interval(2)
            for step in range(STEPS):
                loss, expected = (
                    pipeline.step(batch(step), target=-batch(step)),
                    alone.backward(batch(step), microbatches),
                )
                alone.update()
                assert loss is None or torch.equal(loss, expected), (dtype, schedule, executor, loss, expected)
                if pipeline.scaler is not None:
                    assert pipeline.scaler.state_dict() == alone.scaler.state_dict()
            assert pipeline.scaler is None or pipeline.scaler.get_scale() == 4 * 2.0**16
            check_same(pipeline, alone.model)
            loss, outputs = pipeline.evaluate(batch(9), target=-batch(9), return_outputs=True)
            with torch.autocast("cpu", dtype=dtype):
                wanted = alone.model.eval()(batch(9))
            if outputs is not None:
                assert outputs.dtype == dtype
                assert torch.equal(outputs, wanted)
                torch.testing.assert_close(loss, distance(wanted, -batch(9)).detach())


def borders_have_its_type(rank: int, world: int) -> None:
    config = PipelineConfig(autocast=torch.bfloat16)
    with Pipeline(cut(model_of(), world), loss=distance, config=config) as pipeline:
        pipeline.step(batch(0), target=-batch(0))
        crossing = pipeline._boundaries[0].crossing
        border = crossing.incoming or crossing.outgoing
        assert [slot.dtype for slot in border.items] == [torch.bfloat16]


def backward_is_outside(rank: int, world: int) -> None:
    """What a model keeps out of autocast stays out of it in backward, as in one process."""
    model = Island()
    alone = SingleDevice(model, torch.bfloat16)
    expected = alone.backward(batch(0), 1)
    with Pipeline(cut(model, world), loss=distance, config=PipelineConfig(autocast=torch.bfloat16)) as pipeline:
        loss = pipeline.step(batch(0), target=-batch(0))
        assert loss is None or torch.equal(loss, expected)
        for stage in pipeline.stages:
            for name, value in stage.named_parameters():
                assert torch.equal(value.grad, alone.model.get_parameter(name).grad), name


class Island(nn.Module):
    """A product in float32 between two under autocast."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.rand(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = _in_float32(self.first(x).float(), self.weight)
        out: torch.Tensor = self.last(x)
        return out


@torch.fx.wrap
def _in_float32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return x @ weight


# --- overflows ------------------------------------------------------------------------------------------------


def overflow_on_each_rank(rank: int, world: int) -> None:
    """Whichever rank's gradients overflow, no rank steps and all halve the scale; then training goes on alike."""
    if not has_float16():
        return
    model = model_of()
    alone = SingleDevice(model, torch.float16)
    with make(model, torch.float16) as pipeline:
        for step, culprit in enumerate([None, *range(world), None]):
            before, scale = state_of(pipeline), pipeline.scaler.get_scale()
            spoil = _spoil(pipeline) if rank == culprit else None
            pipeline.step(batch(step), target=-batch(step))
            if spoil is not None:
                spoil.remove()
            same = all(torch.equal(value, before[name]) for name, value in pipeline.state_dict().items())
            assert everyones((same, pipeline.scaler.get_scale())) == (
                [(False, scale)] * world if culprit is None else [(True, scale / 2)] * world
            )
            if culprit is None:
                alone.backward(batch(step), 1)
                alone.update()
            alone.scaler.load_state_dict(pipeline.scaler.state_dict())
        assert pipeline.scaler.get_scale() == 2.0 ** (16 - world)
        check_same(pipeline, alone.model)


def _spoil(pipeline: Pipeline) -> Any:
    """The first gradient of this rank comes out as inf."""
    first = next(pipeline.parameters())
    return first.register_hook(lambda gradient: torch.full_like(gradient, float("inf")))


def overflow_of_the_scale_itself(rank: int, world: int) -> None:
    """A scale that float16 cannot hold overflows in the backward of the later stage, and comes down by itself."""
    if not has_float16():
        return
    model = model_of()
    alone = SingleDevice(model, torch.float16)
    with make(model, torch.float16) as pipeline:
        state = {**pipeline.scaler.state_dict(), "scale": 2.0**24}
        pipeline.scaler.load_state_dict(state)
        alone.scaler.load_state_dict(state)
        scales = []
        for step in range(8):
            alone.backward(batch(step), 1)
            alone.update()
            loss = pipeline.step(batch(step), target=-batch(step))
            assert loss is None or loss.isfinite()
            scales.append(pipeline.scaler.get_scale())
        assert scales[0] == 2.0**23
        assert scales[-1] == scales[-2] == alone.scaler.get_scale()
        check_same(pipeline, alone.model)


def fused_optimizers_skip_too(rank: int, world: int) -> None:
    """They look for overflows themselves, and would look at their own rank's gradients alone."""
    if not has_float16():
        return
    with make(model_of(), torch.float16, optimizer=partial(torch.optim.SGD, lr=0.1, fused=True)) as pipeline:
        before = state_of(pipeline)
        spoil = _spoil(pipeline) if rank == 1 else None
        pipeline.step(batch(0), target=-batch(0))
        if spoil is not None:
            spoil.remove()
        assert all(torch.equal(value, before[name]) for name, value in pipeline.state_dict().items())
        pipeline.step(batch(1), target=-batch(1))
        assert not any(torch.equal(value, before[name]) for name, value in pipeline.state_dict().items())


class LastStageOnly(nn.Module):
    """The second half has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        for _ in range(6):
            x = torch.tanh(x) * 2
        return x


def rank_without_parameters(rank: int, world: int) -> None:
    if not has_float16():
        return
    alone = SingleDevice(LastStageOnly(), torch.float16)
    with make(LastStageOnly(), torch.float16) as pipeline:
        assert (pipeline.optimizer is None) == (rank == 1)
        for step in range(2):
            pipeline.step(batch(step), target=-batch(step))
            alone.backward(batch(step), 1)
            alone.update()
        check_same(pipeline, alone.model)


def program_steps(rank: int, world: int) -> None:
    """Without an optimizer gradients stay scaled: they add up over steps, are clipped, and the scaler steps."""
    if not has_float16():
        return
    model = model_of()
    alone = SingleDevice(model, torch.float16)
    with make(model, torch.float16, optimizer=None) as pipeline:
        optimizer = optimize(pipeline.parameters())
        for step in range(2):
            for part in range(2):
                pipeline.step(batch(10 * step + part), target=-batch(10 * step + part))
                alone.backward(batch(10 * step + part), 1)
            for scaler, own in ((pipeline.scaler, optimizer), (alone.scaler, alone.optimizer)):
                scaler.unscale_(own)
                nn.utils.clip_grad_value_([one for group in own.param_groups for one in group["params"]], 0.01)
                scaler.step(own)
                scaler.update()
                own.zero_grad()
        check_same(pipeline, alone.model)


def scale_is_kept(rank: int, world: int) -> None:
    """The scaler's state dict is that of GradScaler, and the model's has the model's names alone."""
    if not has_float16():
        return
    with make(model_of(), torch.float16) as pipeline:
        spoil = _spoil(pipeline) if rank == 0 else None
        pipeline.step(batch(0), target=-batch(0))
        if spoil is not None:
            spoil.remove()
        pipeline.step(batch(1), target=-batch(1))
        own = pipeline.scaler.state_dict(), pipeline.state_dict(full=True), pipeline.optimizer.state_dict()
        saved = copy.deepcopy(own)
        assert everyones(saved[0]) == [saved[0]] * world
        assert (saved[0]["scale"], saved[0]["_growth_tracker"]) == (2.0**15, 1)
        assert saved[1].keys() == model_of().state_dict().keys()
        pipeline.step(batch(2), target=-batch(2))
        expected = state_of(pipeline)
    with make(model_of(1), torch.float16) as pipeline:
        pipeline.scaler.load_state_dict(saved[0])
        pipeline.load_state_dict(saved[1])
        pipeline.optimizer.load_state_dict(saved[2])
        pipeline.step(batch(2), target=-batch(2))
        assert (pipeline.scaler.get_scale(), pipeline.scaler.state_dict()["_growth_tracker"]) == (2.0**15, 2)
        assert all(torch.equal(value, expected[name]) for name, value in pipeline.state_dict().items())


def a_rank_that_fails_is_named(rank: int, world: int) -> None:
    """While the others ask whether its gradients overflow."""
    if not has_float16():
        return
    with make(model_of(), torch.float16, optimizer=None) as pipeline:
        optimizer = optimize(pipeline.parameters())
        pipeline.step(batch(0), target=-batch(0))
        if rank == 1:
            next(pipeline.parameters()).grad = None
            optimizer.param_groups[0]["params"].append("no tensor")
        with pytest.raises(
            AssertionError if rank == 1 else PipelineError, match=None if rank == 1 else "rank 1 failed"
        ):
            pipeline.scaler.step(optimizer)


def overflow_in_one_replica(rank: int, world: int) -> None:
    """The other pipeline, whose own gradients are finite, skips the step as well."""
    if not has_float16():
        return
    pp, dp = groups_of(rank, world)
    model = model_of()
    with make(model, torch.float16, group=pp, data_parallel=dp) as pipeline:
        for step, culprit in enumerate([None, 0, 3, None]):
            before, scale = state_of(pipeline), pipeline.scaler.get_scale()
            x = batch(10 * step + rank % 2)
            spoil = _spoil(pipeline) if rank == culprit else None
            pipeline.step(x, target=-x)
            if spoil is not None:
                spoil.remove()
            same = all(torch.equal(value, before[name]) for name, value in pipeline.state_dict().items())
            assert everyones((same, pipeline.scaler.get_scale())) == (
                [(False, scale)] * world if culprit is None else [(True, scale / 2)] * world
            )
        mine = state_of(pipeline)
        for other in everyones((rank // 2, mine))[rank // 2 * 2 : rank // 2 * 2 + 2]:
            assert other[0] == rank // 2
            assert all(torch.equal(value, mine[name]) for name, value in other[1].items())


def two_ranks(rank: int, world: int) -> None:
    as_one_process_does(rank, world)
    borders_have_its_type(rank, world)
    backward_is_outside(rank, world)
    overflow_of_the_scale_itself(rank, world)
    fused_optimizers_skip_too(rank, world)
    rank_without_parameters(rank, world)
    program_steps(rank, world)
    scale_is_kept(rank, world)
    a_rank_that_fails_is_named(rank, world)


def four_ranks(rank: int, world: int) -> None:
    overflow_on_each_rank(rank, world)
    overflow_in_one_replica(rank, world)
