"""Pipelines on CUDA: programs stay ahead of their devices, and losses are those of the model by itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn

from torch_lms.pipeline import Pipeline, PipelineConfig
from torch_lms.stages import split

ROWS, WIDTH, MICROBATCHES, SEED = 8, 64, 4, 7


class Model(nn.Module):
    """Two layers with dropout; numbers of its input's shape are used behind the border as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.size(0)
        y = self.dropout(self.first(x)).view(rows, 2, -1)
        loss: torch.Tensor = self.dropout(self.last(y.reshape(rows, WIDTH))).square().mean()
        return loss


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def made() -> tuple[nn.Module, list[Any]]:
    torch.manual_seed(0)
    model = Model()
    traced = fx.symbolic_trace(model)
    names = [node.name for node in traced.graph.nodes if node.op.startswith("call_")]
    stage_of = {name: int(place >= names.index("view")) for place, name in enumerate(names)}
    return model, list(split(traced, stage_of, model=model))


@pytest.mark.usefixtures("alone")
def test_no_stage_waits_for_its_device() -> None:
    model, stages = made()
    x = torch.rand(ROWS * MICROBATCHES, WIDTH, device="cuda")
    config = PipelineConfig(schedule="zero_bubble", microbatches=MICROBATCHES, seed=SEED)
    with Pipeline(stages, device="cuda", config=config) as pipeline:
        assert any("size" in name for name in pipeline.stages[0].outputs)
        pipeline.step(x)
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss = pipeline.step(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    model = model.cuda()
    expected = []
    for number, part in enumerate(x.chunk(MICROBATCHES)):
        torch.manual_seed(SEED + MICROBATCHES + number)
        expected.append(model(part) / MICROBATCHES)
    assert loss is not None
    assert torch.equal(loss, torch.stack(expected).sum())
