"""Steps whose arguments have other shapes than those before; started by ``test_ranks``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from tests.pipeline.scenarios import SEED, close, cut
from torch_lms.errors import PipelineError
from torch_lms.pipeline.boundary import Boundary
from torch_lms.pipeline.config import PipelineConfig
from torch_lms.pipeline.runner import Pipeline
from torch_lms.pipeline.torch_backend import is_available
from torch_lms.stages.cutting import split
from torch_lms.stages.state_dicts import merge_state_dicts

VOCABULARY, WIDTH = 11, 8
# Batch, tokens, and length of the memory; only the last of them changes from the third step to the fourth.
STEPS = [(12, 5, 2), (12, 7, 2), (12, 5, 2), (12, 5, 3), (24, 2, 3), (12, 7, 2)]


class Reader(nn.Module):
    """A mask and a number that depend on the length cross borders; the last stage alone reads a memory."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(layers))
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, memory: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        tokens = x.size(1)
        mask = torch.ones_like(x @ x.transpose(1, 2), dtype=torch.bool).triu(1)
        for mix, norm in zip(self.mix, self.norms, strict=True):
            scores = (x @ mix(x).transpose(1, 2)).masked_fill(mask, -1e9).softmax(-1)
            x = x + norm((self.drop(scores) @ x).transpose(1, 2)).transpose(1, 2) / tokens
        x = x + (x @ memory.transpose(1, 2)).softmax(-1) @ memory
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def reader() -> Reader:
    torch.manual_seed(2)
    return Reader()


def batches() -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(9)
    for rows, tokens, remembered in STEPS:
        ids = torch.randint(VOCABULARY, (rows, tokens), generator=generator)
        yield {
            "ids": ids,
            "memory": torch.rand(rows, remembered, WIDTH, generator=generator),
            "targets": ids.roll(-1, 1),
        }


def single_device(microbatches: int) -> Iterator[tuple[Reader, torch.Tensor]]:
    """The model after each step, with its gradients, and the loss."""
    model = reader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, batch in enumerate(batches()):
        optimizer.zero_grad()
        parts = []
        for index in range(microbatches):
            torch.manual_seed(SEED + step * microbatches + index)
            loss = model(**{name: value.chunk(microbatches)[index] for name, value in batch.items()})
            loss = loss / microbatches if microbatches > 1 else loss
            loss.backward()
            parts.append(loss.detach())
        optimizer.step()
        yield model, torch.stack(parts).sum()


def check_shapes(schedule: str, executor: str, stages: int, microbatches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is the single device's, and only shapes that are new have a run of their own."""
    runs: list[int] = []
    prepare = Boundary.prepare

    def counted(self: Boundary, *given: object) -> list[torch.Tensor]:
        runs.append(self.stage.index)
        return prepare(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Boundary, "prepare", counted)
    config = PipelineConfig(schedule=schedule, executor=executor, microbatches=microbatches, seed=SEED)
    with Pipeline(cut(reader(), stages), config=config) as pipeline:
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        needed = {name for stage in pipeline.stages for name in stage.feeds}
        for batch, (model, expected) in zip(batches(), single_device(microbatches), strict=True):
            optimizer.zero_grad()
            loss = pipeline.step(**{name: value for name, value in batch.items() if name in needed})
            optimizer.step()
            if loss is not None:
                close(loss, expected, microbatches)
            for stage in pipeline.stages:
                for name, value in stage.named_parameters():
                    gradient = model.get_parameter(name).grad
                    assert value.grad is not None, name
                    assert gradient is not None, name
                    close(value.grad, gradient, microbatches)
        states: list[dict[str, torch.Tensor]] = [{}] * dist.get_world_size()
        dist.all_gather_object(states, pipeline.state_dict())
        assert len(runs) == len(pipeline.stages) * len(set(STEPS))
    monkeypatch.undo()
    merged = merge_state_dicts(states)
    for name, value in model.state_dict().items():
        close(merged[name], value, microbatches)


def shapes_change(rank: int, world: int) -> None:
    """Under every schedule of every executor that there is."""
    cases = [("gpipe", "own", world, 1), ("1f1b", "own", world, 4)]
    if is_available():
        cases += [("gpipe", "torch", world, 4), ("1f1b", "torch", world, 4), ("1f1b", "torch", world, 1)]
        cases += [("interleaved", "torch", 2 * world, world), ("zero_bubble", "torch", 2 * world, world)]
    with pytest.MonkeyPatch.context() as monkeypatch:
        for case in cases:
            check_shapes(*case, monkeypatch)
            if rank == 0:
                print("equal", *case, flush=True)


class ForOneLength(nn.Module):
    """Its graph is for the length of the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (self.last(self.first(x)) * weight).square().mean()


def shapes_that_cannot_change(rank: int, world: int) -> None:
    """All ranks are told which argument of which rank it is."""
    from torch_lms.profile.tracing import trace

    model, x, weight, longer = ForOneLength(), *(torch.rand(4, tokens, 4) for tokens in (3, 3, 5))
    traced = trace(model, (x[:2], weight[:2]), sources=("recorded",))
    assert traced.graph_module is not None
    nodes = [node.name for node in traced.graph_module.graph.nodes if node.op.startswith("call_")]
    stage_of = {name: int(index > 0) for index, name in enumerate(nodes)}
    for given, name, teller in [((longer, weight), "x", 0), ((x, longer), "weight", 1)]:
        words = rf"expected '{name}' of shape \[2, 3, 4\], for which .*, found \[2, 5, 4\]"
        stages = split(traced, stage_of, model=model)
        pipeline = Pipeline(stages, config=PipelineConfig(microbatches=2))
        pipeline.step(x, weight)
        with pytest.raises(PipelineError, match=words if rank == teller else f"rank {teller} failed: .*{words}"):
            pipeline.step(*given)
        pipeline.close()


def closed_too_early(rank: int, world: int) -> None:
    """Who does another step than the others is told so."""
    with Pipeline(cut(reader(), world), config=PipelineConfig(microbatches=4, executor="own")) as pipeline:
        batch = next(batches())
        pipeline.step(**batch)
        if rank == 0:
            with pytest.raises(PipelineError, match="rank 1, found that it has closed its pipeline"):
                pipeline.step(**batch)
        else:
            pipeline.close()
            state = pipeline.state_dict()
            for use in (partial(pipeline.step, **batch), partial(pipeline.load_state_dict, state)):
                with pytest.raises(
                    PipelineError, match=r"expected an open pipeline, found one that close\(\) has ended"
                ):
                    use()
