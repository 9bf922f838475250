"""Pipelines beside other things: middle ranks, other pipelines, evaluation, state dicts, compilation."""

from __future__ import annotations

import copy
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from tests.pipeline.scenarios import (
    BATCH,
    SEED,
    TinyGPT,
    batch,
    check_equal,
    close,
    cut,
    loss_of,
    made,
)
from torch_lms._torch_compat import named_parameters_with_ties
from torch_lms.errors import PipelineError
from torch_lms.partition.costs import DataParallel
from torch_lms.pipeline import training
from torch_lms.pipeline.config import PipelineConfig
from torch_lms.pipeline.runner import Pipeline
from torch_lms.pipeline.torch_backend import is_available
from torch_lms.pipeline.training import train
from torch_lms.profile.profiler import ProfileConfig

EXECUTORS = ["own", "torch"] if is_available() else ["own"]
PROFILE = ProfileConfig(warmup_runs=1, timed_runs=2, progress=False)


def wide_batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.cat([batch()[0].roll(shift, 1) for shift in range(rows // BATCH)])
    return ids, ids.roll(-1, 1)


# --- a middle rank --------------------------------------------------------------------------------------------


def middle_rank(rank: int, world: int) -> None:
    """Three ranks: stages train, evaluate and accumulate as one device does."""
    for executor in EXECUTORS:
        check_equal("1f1b", executor, 3, 4, True)
        check_equal("gpipe", executor, 3, 2, False)
    if is_available():
        check_equal("interleaved", "torch", 6, 2, True)
    evaluation(rank, world)
    gradient_accumulation(rank, world)
    stages_of_several_rounds_evaluate(rank, world)
    state_dicts(rank, world)
    through_checkpoint(rank, world)


def evaluation(rank: int, world: int) -> None:
    """Dropout is off and batch norms use what they have gathered; modes are as before, and nothing has a gradient."""
    model = made(False)
    ids, targets = batch()
    model.blocks[1].eval()
    expected = copy.deepcopy(model).eval()(ids)
    with Pipeline(cut(model, world), loss=loss_of, config=PipelineConfig(microbatches=2, seed=SEED)) as pipeline:
        modes = [module.training for stage in pipeline.stages for module in stage.modules()]
        for rows in (4, 2):  # another batch size than before
            loss, outputs = pipeline.evaluate(ids[:rows], target=targets[:rows], return_outputs=True)
            assert (loss is None) == (outputs is None) == (rank != world - 1)
            if rank == world - 1:
                torch.testing.assert_close(outputs, expected[: rows * ids.shape[1]])
                torch.testing.assert_close(loss, loss_of(expected[: rows * ids.shape[1]], targets[:rows]))
        assert [module.training for stage in pipeline.stages for module in stage.modules()] == modes
        assert all(parameter.grad is None for parameter in pipeline.parameters())
        alone = pipeline.evaluate(ids, return_outputs=True)
        assert alone[0] is None
        gathered = pipeline.state_dict(full=True)
        assert all(torch.equal(gathered[name], value) for name, value in model.state_dict().items())
        pipeline.step(ids, target=targets)  # and training goes on


HAS_ATTENTION = hasattr(functional, "scaled_dot_product_attention")


class WroteDown(nn.Module):
    """Functions whose mode a trace writes down."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.dropout(self.first(x), 0.5, self.training)
        norm = self.norm
        x = functional.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, self.training)
        if HAS_ATTENTION:
            x = functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5 if self.training else 0.0)
        return self.last(functional.dropout(x, p=0.5, training=self.training))


def modes_in_traces(rank: int, world: int) -> None:
    """What the trace wrote down for training is not so while stages evaluate."""
    torch.manual_seed(0)
    model, x = WroteDown(), torch.rand(4, 4)
    expected = copy.deepcopy(model).eval()(x)
    options = {"loss": functional.mse_loss, "profile": PROFILE, "algorithm": "uniform"}  # the first stage has a dropout
    pipeline = train(model, None, x, optimizer=None, **options)
    with pipeline:
        assert "self.training" in "".join(stage.code for stage in pipeline.stages) or rank
        _, outputs = pipeline.evaluate(x, return_outputs=True)
        if outputs is not None:
            torch.testing.assert_close(outputs, expected)


def gradient_accumulation(rank: int, world: int) -> None:
    """Two steps before the optimizer's are one step over both batches."""
    first, second = batch(), tuple(part.flip(0) for part in batch())
    model = made(True)
    for norm in (block.norm for block in model.blocks):
        norm.eval()
    reference = copy.deepcopy(model)
    for index, (ids, targets) in enumerate([first, second]):
        for number, parts in enumerate(zip(ids.chunk(2), targets.chunk(2), strict=True)):
            torch.manual_seed(SEED + 2 * index + number)
            (reference(*parts) / 2).backward()
    with Pipeline(cut(model, world), config=PipelineConfig(microbatches=2, seed=SEED)) as pipeline:
        pipeline.step(*first)
        pipeline.step(*second)
        check_gradients(pipeline, reference)


def check_gradients(pipeline: Pipeline, reference: nn.Module, rtol: float = 1e-5) -> None:
    tied = dict(named_parameters_with_ties(reference))
    for stage in pipeline.stages:
        for name, value in stage.named_parameters():
            torch.testing.assert_close(value.grad, tied[name].grad, rtol=rtol, atol=1e-6)


def stages_of_several_rounds_evaluate(rank: int, world: int) -> None:
    if not is_available():
        return
    model = made(True).eval()
    ids, targets = batch()
    for microbatches in (1, 4):  # fewer and more than ranks
        config = PipelineConfig(schedule="interleaved", microbatches=microbatches)
        with Pipeline(cut(model, 2 * world), config=config) as pipeline:
            loss = pipeline.evaluate(ids, targets)
            if loss is not None:
                torch.testing.assert_close(loss, model(ids, targets).detach())


# --- state dicts ----------------------------------------------------------------------------------------------


def state_dicts(rank: int, world: int) -> None:
    """Whole ones and parts go in and out; errors name entries, and the pipeline is of use after them."""
    torch.manual_seed(8 + rank)
    other = TinyGPT(True)
    whole: list[Any] = [other.state_dict() if rank == 0 else None]
    dist.broadcast_object_list(whole, src=0)
    expected = whole[0]
    with Pipeline(cut(made(True), world)) as pipeline:
        pipeline.load_state_dict(expected)
        assert all(torch.equal(value, expected[name]) for name, value in pipeline.state_dict().items())
        full = pipeline.state_dict(full=True)
        assert list(full) == list(expected)
        assert all(torch.equal(full[name], value) for name, value in expected.items())
        own = pipeline.state_dict(full=True, to=1)
        assert (set(own) == set(expected)) if rank == 1 else not own
        pipeline.load_state_dict({name: value.clone() for name, value in pipeline.state_dict().items()})
        refused = {name: value for name, value in expected.items() if name != "blocks.1.mix.bias"}
        with pytest.raises(PipelineError, match=r"'new\.bias' is unexpected") as raised:
            pipeline.load_state_dict({**refused, "new.bias": torch.ones(1)})
        texts = [""] * world
        dist.all_gather_object(texts, str(raised.value))
        assert sum("'blocks.1.mix.bias' is missing" in text for text in texts) == 1
        wrong = {**expected, "blocks.2.mix.bias": torch.ones(3)}
        with pytest.raises(PipelineError, match=r"blocks\.2\.mix\.bias"):
            pipeline.load_state_dict(wrong)
        pipeline.load_state_dict({**refused, "new.bias": torch.ones(1)}, strict=False)
        pipeline.step(*batch())


def through_checkpoint(rank: int, world: int) -> None:
    """What three stages saved, two load; and with the optimizer's state where each rank has one stage."""
    if not is_available():
        return
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    told: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(told, src=0)
    folder = Path(told[0])
    with Pipeline(cut(made(True), world)) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters())
        pipeline.step(*batch())
        optimizer.step()
        optimizer_state = get_state_dict(pipeline.stages[0], optimizer)[1]
        checkpoint.save({"model": pipeline.state_dict(), "optimizer": optimizer_state}, checkpoint_id=folder)
        saved = pipeline.state_dict(full=True)
        moments = [None] * world
        dist.all_gather_object(moments, optimizer_state["state"])
    fewer = dist.new_group(range(world - 1))
    if rank == world - 1:
        return
    known = {name: value for part in moments for name, value in part.items()}  # type: ignore[attr-defined]
    with Pipeline(cut(made(True), world - 1), group=fewer) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters())
        optimizer_state = get_state_dict(pipeline.stages[0], optimizer)[1]
        state = {"model": pipeline.state_dict(), "optimizer": optimizer_state}
        checkpoint.load(state, checkpoint_id=folder, process_group=fewer)
        pipeline.load_state_dict(state["model"])
        set_state_dict(
            pipeline.stages[0], optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        assert all(torch.equal(saved[name], value) for name, value in pipeline.state_dict().items())
        now = get_state_dict(pipeline.stages[0], optimizer)[1]["state"]
        for name, value in now.items():
            assert torch.equal(value["exp_avg"], known[name]["exp_avg"]), name


# --- pipelines side by side -----------------------------------------------------------------------------------


def groups_of(rank: int, world: int) -> tuple[Any, Any]:
    """Two pipelines, of the ranks 0 and 2 and of 1 and 3; as a mesh where there is one."""
    try:
        from torch.distributed.device_mesh import init_device_mesh
    except ImportError:
        made_groups = {ranks: dist.new_group(ranks) for ranks in [(0, 2), (1, 3), (0, 1), (2, 3)]}
        return made_groups[(rank % 2, rank % 2 + 2)], made_groups[(rank // 2 * 2, rank // 2 * 2 + 1)]
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pp", "dp"))
    return mesh["pp"], mesh["dp"]


def data_parallel(rank: int, world: int) -> None:
    """Two pipelines train like one device on the whole batch, and hold the same bits."""
    pp, dp = groups_of(rank, world)
    ids, targets = wide_batch(2 * BATCH)
    mine = rank % 2
    for executor in EXECUTORS:
        reference = made(True)
        torch.manual_seed(rank)
        own = made(True) if mine == 0 else TinyGPT(True)  # the second begins as the first does
        config = PipelineConfig(microbatches=2, executor=executor, seed=SEED)
        optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
        with Pipeline(cut(own, 2), group=pp, data_parallel=dp, config=config) as pipeline:
            assert (pipeline.rank, pipeline.ranks) == (rank // 2, 2)
            pipeline_optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.9)
            for step in range(2):
                optimizer.zero_grad()
                pipeline_optimizer.zero_grad()
                for number, parts in enumerate(zip(ids.chunk(4), targets.chunk(4), strict=True)):
                    torch.manual_seed(SEED + step * 4 + number)
                    (reference(*parts) / 4).backward()
                half = slice(mine * BATCH, (mine + 1) * BATCH)
                pipeline.step(ids[half], targets[half])
                check_gradients(pipeline, reference, rtol=1e-4)
                optimizer.step()
                pipeline_optimizer.step()
            parameters = [dict(stage.named_parameters()) for stage in pipeline.stages]
            everyone: list[Any] = [None] * world
            dist.all_gather_object(everyone, parameters)
            for name, value in parameters[0].items():
                assert torch.equal(value, everyone[rank ^ 1][0][name]), name


def side_by_side(rank: int, world: int) -> None:
    """Without data parallel, pipelines know nothing of each other; one may make more of them than the other."""
    pp, _ = groups_of(rank, world)
    for _ in range(1 + rank % 2):
        with Pipeline(cut(made(True), 2), group=pp, config=PipelineConfig(microbatches=2, seed=rank % 2)) as pipeline:
            pipeline.step(*batch())
            assert pipeline.state_dict(full=True).keys() == made(True).state_dict().keys()


def other_stages_in_data_parallel(rank: int, world: int) -> None:
    pp, _ = groups_of(rank, world)
    crossed = {ranks: dist.new_group(ranks) for ranks in [(0, 3), (1, 2)]}
    with pytest.raises(PipelineError, match=r"hold the same stages, found others|rank . failed"):
        Pipeline(cut(made(True), 2), group=pp, data_parallel=crossed[0, 3] if rank in (0, 3) else crossed[1, 2])


def facade_beside_data_parallel(rank: int, world: int) -> None:
    """One call for two pipelines, which share the partition of the first."""
    pp, dp = groups_of(rank, world)
    torch.manual_seed(0)
    model, x = plain_model(), torch.rand(8, 8)
    with mock.patch.object(training, "create_balanced_partition", wraps=training.create_balanced_partition) as called:
        pipeline = train(
            model,
            pp,
            {"x": x},
            microbatches=2,
            optimizer=partial(torch.optim.SGD, lr=0.5),
            loss=functional.mse_loss,
            data_parallel=dp,
            profile=PROFILE,
        )
    assert called.call_args.kwargs["config"].cost.data_parallel == DataParallel(ranks=2)
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    whole = torch.rand(16, 8, generator=torch.Generator().manual_seed(1))
    with pipeline:
        for _ in range(2):
            optimizer.zero_grad()
            functional.mse_loss(reference(whole), -whole).backward()
            optimizer.step()
            half = whole.chunk(2)[rank % 2]
            pipeline.step(x=half, target=-half)
        for name, value in pipeline.state_dict(full=True).items():
            torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-4, atol=1e-6)


def four_ranks(rank: int, world: int) -> None:
    data_parallel(rank, world)
    side_by_side(rank, world)
    facade_beside_data_parallel(rank, world)
    other_stages_in_data_parallel(rank, world)


# --- two ranks ------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def plain_model() -> nn.Module:
    return Plain()


def facade(rank: int, world: int) -> None:
    """`train` does what its parts do; without an optimizer it leaves gradients alone."""
    torch.manual_seed(0)
    model, x = plain_model(), torch.rand(8, 8)
    for schedule in ("1f1b", "interleaved") if is_available() else ("1f1b",):
        reference = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(reference.parameters())
        with train(
            copy.deepcopy(model),
            None,
            x,
            schedule=schedule,
            microbatches=4,
            loss=functional.mse_loss,
            algorithm="parameters",
            profile=PROFILE,
        ) as pipeline:
            assert isinstance(pipeline.optimizer, torch.optim.AdamW)
            assert (pipeline.config.schedule, pipeline.config.microbatches) == (schedule, 4)
            for _ in range(2):
                optimizer.zero_grad()
                expected = functional.mse_loss(reference(x), -x)
                expected.backward()
                optimizer.step()
                loss = pipeline.step(x, target=-x)
                close(loss if loss is not None else expected.detach(), expected.detach(), 4)
            assert all(parameter.grad is None for parameter in pipeline.parameters())
            evaluated = pipeline.evaluate(x, target=-x)
            if evaluated is not None:
                torch.testing.assert_close(evaluated, functional.mse_loss(reference(x), -x).detach())
            for name, value in pipeline.state_dict(full=True).items():
                torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-4, atol=1e-5)
    with train(model, None, (x,), optimizer=None, loss=functional.mse_loss, profile=PROFILE) as pipeline:
        pipeline.step(x, target=-x)
        assert pipeline.optimizer is None
        assert all(parameter.grad is not None for parameter in pipeline.parameters())
    with pytest.raises(PipelineError, match=r"adamw.*found 'adamx'"):
        train(model, None, x, optimizer="adamx")


def compiled(rank: int, world: int) -> None:
    """Stages are compiled once, before the first step."""
    if not is_available():
        return
    torch.manual_seed(0)
    model, x = plain_model(), torch.rand(4, 8)
    reference = copy.deepcopy(model)
    for part in x.chunk(2):
        (reference(part).square().mean() / 2).backward()
    graphs = []

    def count(graph: torch.fx.GraphModule, sample: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    config = PipelineConfig(microbatches=2)
    with Pipeline(cut(model, world), loss=lambda out, _: out.square().mean(), config=config) as pipeline:
        for stage in pipeline.stages:
            stage.compile(backend=count)
        pipeline.step(x, target=x)
        assert graphs
        check_gradients(pipeline, reference)


class InADict(Plain):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        out = super().forward(x)
        return {"loss": out.square().mean(), "logits": out}


def loss_in_a_dict(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model, x = InADict(), torch.rand(4, 8)
    expected = copy.deepcopy(model)(x)
    with Pipeline(cut(model, world), config=PipelineConfig(microbatches=2)) as pipeline:
        loss = pipeline.step(x)
        evaluated, outputs = pipeline.evaluate(x, return_outputs=True)
        if loss is not None:
            torch.testing.assert_close(loss, expected["loss"].detach())
            torch.testing.assert_close(evaluated, expected["loss"].detach())
            torch.testing.assert_close(outputs["logits"], expected["logits"].detach())
            assert outputs["loss"].shape == (2,)


def groups_that_are_none(rank: int, world: int) -> None:
    alone = dist.new_group([0])
    with pytest.raises(PipelineError, match="a group that rank 1 belongs to" if rank else "found 2"):
        Pipeline(cut(made(True), 2), group=alone, config=PipelineConfig(schedule="1f1b"))


def two_ranks(rank: int, world: int) -> None:
    modes_in_traces(rank, world)
    facade(rank, world)
    loss_in_a_dict(rank, world)
    stages_of_several_rounds_evaluate(rank, world)
    groups_that_are_none(rank, world)


# --- failures -------------------------------------------------------------------------------------------------


def fails_and_stays(rank: int, world: int) -> None:
    """A rank fails, and its process lives on; the others' waits end, those in the other pipeline as well."""
    pp, dp = groups_of(rank, world)
    store = dist.distributed_c10d._get_default_store()
    with Pipeline(cut(made(True), 2), group=pp, data_parallel=dp, config=PipelineConfig(microbatches=2)) as pipeline:
        pipeline.step(*batch())
        ids, targets = batch()
        kept = slice(3 if rank == 3 else 4)
        with pytest.raises(PipelineError, match="2 microbatches divide" if rank == 3 else "rank 3 failed: .*found 3"):
            pipeline.step(ids[kept], targets[kept])
        with pytest.raises(PipelineError, match="rank 3 failed"):
            pipeline.step(*batch())
        store.add("ended", 1)
        while store.add("ended", 0) < world:
            time.sleep(0.05)
