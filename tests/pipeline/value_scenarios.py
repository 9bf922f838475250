"""What ranks of the tests do with values of unusual kinds: conjugated views, mappings, sizes in words."""

from __future__ import annotations

import copy
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional

from tests.pipeline.scenarios import batch, cut, made
from torch_lms.errors import LimitError, PipelineError
from torch_lms.pipeline.config import PipelineConfig
from torch_lms.pipeline.runner import Pipeline
from torch_lms.pipeline.torch_backend import is_available
from torch_lms.pipeline.training import train
from torch_lms.profile.profiler import ProfileConfig
from torch_lms.stages.cutting import split
from torch_lms.stages.stage import Stage

# --- views that are conjugated or negated ---------------------------------------------------------------------------


class Waves(nn.Module):
    """What crosses is a conjugated view and a negated one.

    Conjugated views are also the gradients of what crosses, and that of the shared weight in the last stage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = torch.fft.fft(self.first(x)) * self.turn
        conjugated, negated = turned.conj(), torch.imag(turned.mean().conj())
        plain = conjugated.conj() * torch.fft.fft(self.last(torch.imag(conjugated)))
        return (torch.real(plain * self.turn.conj()) + negated).square().mean() / 1000


def cut_waves(model: nn.Module) -> list[Stage]:
    """Behind what makes the negated view."""
    traced = fx.symbolic_trace(model)
    names = [node.name for node in traced.graph.nodes if node.op.startswith("call_")]
    border = names.index("imag")
    stages = split(traced, {name: int(place > border) for place, name in enumerate(names)}, model=model)
    assert len(stages[0].outputs) == 2
    assert "turn" in stages[0].shared
    return stages


def conjugated_values(rank: int, world: int) -> None:
    """They and their gradients are sent as the values that they are."""
    for executor in ("own", "torch") if is_available() else ("own",):
        torch.manual_seed(4)
        model, x = Waves(), torch.randn(4, 8)
        reference = copy.deepcopy(model)
        config = PipelineConfig(schedule="1f1b", executor=executor, microbatches=2)
        with Pipeline(cut_waves(model), config=config) as pipeline:
            optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (pipeline, reference)]
            for _ in range(2):
                expected = sum(reference(part) / 2 for part in x.chunk(2))
                expected.backward()
                loss = pipeline.step(x)
                assert loss is None or torch.allclose(loss, expected.detach())
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            for name, value in pipeline.state_dict(full=True).items():
                torch.testing.assert_close(value, reference.state_dict()[name])
            evaluated = pipeline.evaluate(x)
            expected = sum(reference(part) / 2 for part in x.chunk(2))
            assert evaluated is None or torch.allclose(evaluated, expected.detach())


# --- mappings that are no dicts -------------------------------------------------------------------------------------


class Encoding(UserDict[str, Any]):
    """Like a BatchEncoding of transformers."""


class Weighed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x * weights).square().mean()


def mappings(rank: int, world: int) -> None:
    """Their items are arguments by name, which are cut into microbatches; a cap may be written in words."""
    torch.manual_seed(0)
    model, encoding = Weighed(), Encoding(x=torch.rand(8, 8), weights=torch.rand(8, 1))
    reference = copy.deepcopy(model)
    profile = ProfileConfig(warmup_runs=1, timed_runs=1, progress=False, links=False)
    options: dict[str, Any] = {"microbatches": 4, "algorithm": "parameters", "profile": profile}
    for cap in ("40 elephants", "50%"):  # of a CPU, nobody says how much it has
        with pytest.raises(LimitError, match="expected a size"):
            train(model, None, encoding, memory_cap_bytes=cap, **options)
    with train(model, None, encoding, memory_cap_bytes="1GiB", **options) as pipeline:
        loss = pipeline.step(**encoding)
        expected = reference(**encoding).detach()
        assert loss is None or torch.allclose(loss, expected)


def targets_in_mappings(rank: int, world: int) -> None:
    """Each microbatch's loss function gets its own part."""
    model, (ids, targets) = made(False), batch()

    def loss_of(logits: torch.Tensor, labels: Any) -> torch.Tensor:
        assert labels["ids"].shape[0] == 2
        return functional.cross_entropy(logits, labels["ids"].flatten())

    with Pipeline(cut(model, world), loss=loss_of, config=PipelineConfig(microbatches=2)) as pipeline:
        pipeline.step(ids, target=Encoding(ids=targets))


# --- whom a state dict is for ---------------------------------------------------------------------------------------


def state_dicts_for_nobody(rank: int, world: int) -> None:
    """All ranks are told before any of them waits; the pipeline is of use afterwards."""
    with Pipeline(cut(made(True), world)) as pipeline:
        gathered = pipeline._messages.gathers
        for to in (0, 1):
            with pytest.raises(PipelineError, match=rf"to= with full=True alone, found to={to}"):
                pipeline.state_dict(to=to)
        for to in (-1, world, 7):
            with pytest.raises(PipelineError, match=rf"0 to {world - 1}, found {to};"):
                pipeline.state_dict(full=True, to=to)
        assert pipeline._messages.gathers == gathered
        assert bool(pipeline.state_dict(full=True, to=world - 1)) == (rank == world - 1)
        pipeline.step(*batch())
