"""What the scenarios of models that are spread over ranks share."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import torch_lms
from tests.chunk.plain import Optimize, Plain, loss_of
from tests.chunk.test_chunked import OPTIMIZERS
from tests.unit.trainings import Batch
from torch_lms.chunk.gathered import GatheredChunks
from torch_lms.chunk.sharding import ShardedOccupancy

DEVICE = os.environ.get("TORCH_LMS_TEST_DEVICE", "cpu")
STEPS = 3
ADAMW = OPTIMIZERS["AdamW"]

Backward = Callable[[nn.Module, Sequence[Batch], Callable[[], None]], torch.Tensor]
"""Gets the model, batches, and what to call after each backward; returns a loss."""


def chunked(
    model: nn.Module,
    optimize: Optimize = ADAMW,
    order: Callable[[nn.Module], list[nn.Parameter]] | None = None,
    **options: Any,
) -> tuple[nn.Module, Any]:
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    if order is not None:
        options["order"] = order(placed(model))
    return torch_lms.chunked(placed(model), optimize(model.parameters()), mesh=mesh, **options)


def placed(model: nn.Module) -> nn.Module:
    return model if next(model.parameters()).is_meta else model.to(DEVICE)


def once(model: nn.Module, batches: Sequence[Batch], after: Callable[[], None]) -> torch.Tensor:
    loss = loss_of(model, batches[0])
    loss.backward()
    after()
    return loss


def accumulated(model: nn.Module, batches: Sequence[Batch], after: Callable[[], None]) -> torch.Tensor:
    losses = [once(model, [batch], after) for batch in batches]
    return sum(losses[1:], losses[0])


def evaluated(model: nn.Module, batches: Sequence[Batch], after: Callable[[], None]) -> torch.Tensor:
    once(model, batches, after)
    with torch.no_grad():
        return loss_of(model, batches[1])


def retained(model: nn.Module, batches: Sequence[Batch], after: Callable[[], None]) -> torch.Tensor:
    loss = loss_of(model, batches[0])
    for last in (False, True):
        loss.backward(retain_graph=not last)
        after()
    return loss


BACKWARDS: dict[str, Backward] = {
    "once": once,
    "accumulated": accumulated,
    "evaluated": evaluated,
    "retained": retained,
}


def batches_of(batch: Callable[[int], Batch], step: int, rank: int, world: int) -> list[Batch]:
    return [batch(100 * step + 10 * part + rank) for part in range(2)]


def mean_of(gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Of ranks, as they take it: in the gradients' own type."""
    found = [one / len(gradients) for one in gradients if one is not None]
    return sum(found[1:], found[0]) if found else None


def expected(
    model: nn.Module,
    optimize: Optimize,
    batch: Callable[[int], Batch],
    world: int,
    backward: Backward = once,
    on: str | None = None,
) -> Iterator[tuple[list[torch.Tensor], Plain]]:
    """The losses of all ranks, step by step, in one process without chunks."""
    plain = Plain(model, optimize, on=on)
    gradients: list[list[torch.Tensor | None]] = []

    def after() -> None:
        gradients.append([one.grad for one in plain.parameters])
        plain.zero_grad()

    for step in range(STEPS):
        losses, of_ranks = [], []
        buffers = {name: one.clone() for name, one in model.named_buffers()}
        for rank in range(world):
            model.load_state_dict(buffers, strict=False)
            torch.manual_seed(step)
            gradients = []
            losses.append(backward(model, batches_of(batch, step, rank, world), after).detach())
            of_ranks.append(gradients)
        for number, parameter in enumerate(plain.parameters):
            means = [mean_of([one[number] for one in of_backward]) for of_backward in zip(*of_ranks, strict=True)]
            came = [one for one in means if one is not None]
            parameter.grad = sum(came[1:], came[0]) if came else None
        plain.step()
        plain.zero_grad()
        yield losses, plain


def expect_equal(
    make: Callable[[], nn.Module],
    batch: Callable[[int], Batch],
    rank: int,
    world: int,
    *,
    optimize: Optimize = ADAMW,
    backward: Backward = once,
    **options: Any,
) -> None:
    """Losses, and at the end the masters, are those of one process that has all gradients."""
    torch.manual_seed(0)
    plain = placed(make())
    torch.manual_seed(rank)  # the first rank's model is everybody's
    model, optimizer = chunked(make() if rank else copy.deepcopy(plain), optimize, **options)
    on = "cpu" if options.get("update_on") == "host" else None
    for step, (losses, reference) in enumerate(expected(plain, optimize, batch, world, backward, on)):
        torch.manual_seed(step)
        found = backward(model, batches_of(batch, step, rank, world), lambda: None).detach()
        assert torch.equal(found, losses[rank]), (step, found, losses)
        optimizer.step()
        state = model.state_dict()
        for (name, one), master in zip(plain.named_parameters(), reference.masters, strict=True):
            expected_value = master if one.requires_grad else one
            assert torch.equal(state[name].cpu(), expected_value.detach().cpu()), (step, name)
    check_released(optimizer)


def check_released(optimizer: Any) -> None:
    data = optimizer._data
    assert isinstance(optimizer._occupancy, ShardedOccupancy)
    assert not data.gathered.open
    for number, one in enumerate(data.tensors):
        if data.is_cut[data.chunk_of(number)]:
            with pytest.raises(RuntimeError, match="bytes are spread over ranks"):
                one.parameter.untyped_storage().data_ptr()


def most_whole(model: nn.Module, optimizer: Any, batch: Batch) -> int:
    """The most chunks that are whole at a time in a step."""
    gathered, counts = optimizer.data.gathered, []

    def begin(self: GatheredChunks, *arguments: Any) -> None:
        begin_chunk(self, *arguments)
        counts.append(len(gathered.open))

    begin_chunk = GatheredChunks.begin
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GatheredChunks, "begin", begin)
        once(model, [batch], lambda: None)
    optimizer.step()
    return max(counts)


def save_path() -> str:
    return str(Path(urlsplit(sys.argv[4]).path).with_name("checkpoint"))
