"""Models that are spread over ranks: run by ``tests.pipeline.ranks``."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_lms
from tests.chunk.plain import Plain, loss_of
from tests.chunk.spread import (
    ADAMW,
    BACKWARDS,
    DEVICE,
    accumulated,
    batches_of,
    chunked,
    expect_equal,
    mean_of,
    most_whole,
    once,
    placed,
)
from tests.chunk.test_chunked import OPTIMIZERS, Owner, in_order
from tests.chunk.test_order import Parallel
from tests.unit.trainings import TRAININGS, Batch, vector_batch
from torch_lms.chunk import order_of_use, streamed_updates


def training(name: str, rank: int, world: int) -> None:
    one = next(one for one in TRAININGS if one.name == name)
    expect_equal(one.make, one.batch, rank, world)


def gpt(rank: int, world: int) -> None:
    training("gpt", rank, world)


def rnn(rank: int, world: int) -> None:
    training("rnn", rank, world)


def mlp(rank: int, world: int) -> None:
    training("large state", rank, world)


def backwards(rank: int, world: int) -> None:
    for backward in BACKWARDS.values():
        for reuse in (True, False):
            make = partial(Owner, in_order)
            expect_equal(make, vector_batch, rank, world, backward=backward, reuse_gradients=reuse)


def optimizers(rank: int, world: int) -> None:
    for name in ("SGD with momentum", "Adam", "AdamW"):
        if name in OPTIMIZERS:
            make = partial(Owner, in_order)
            expect_equal(make, vector_batch, rank, world, optimize=OPTIMIZERS[name])


def on_the_host(rank: int, world: int) -> None:
    one = TRAININGS[0]
    expect_equal(one.make, one.batch, rank, world, update_on="host")


def streamed(rank: int, world: int) -> None:
    streamed_updates._PORTION_NUMEL = 1 << 11
    one = TRAININGS[0]
    expect_equal(one.make, one.batch, rank, world, update_on="stream")


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(128, 128)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(4))
        self.last = nn.Linear(128, 64)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


def narrow_batch(step: int) -> Batch:
    torch.manual_seed(step)
    return torch.randn(8, 128), torch.randint(0, 64, (8,))


def checkpointed(rank: int, world: int) -> None:
    for reentrant in (True, False):
        expect_equal(partial(Checkpointed, reentrant), narrow_batch, rank, world)


def without_bytes(rank: int, world: int) -> None:
    """A model on the meta device is filled tensor by tensor, and trains as one that was there."""
    torch.manual_seed(0)
    there = Checkpointed(reentrant=False)
    with torch.device("meta"):
        model = Checkpointed(reentrant=False)
    filled = chunked(model, device=DEVICE)
    for name, value in there.state_dict().items():
        filled[0].load_state_dict({name: value}, strict=False)
    expected_losses = losses_of(*chunked(there), rank, world, range(2))
    assert all(map(torch.equal, expected_losses, losses_of(*filled, rank, world, range(2))))


class ExpertBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(128, 128) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[int(x.sum().item()) % 3](x).tanh()


class Routed(nn.Module):
    """Which experts are used depends on the data, and so on the rank; one layer nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(128, 128)
        self.blocks = nn.ModuleList(ExpertBlock() for _ in range(3))
        self.spare = nn.Linear(128, 64)
        self.last = nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def routed(rank: int, world: int) -> None:
    for backward in (once, accumulated):
        expect_equal(Routed, narrow_batch, rank, world, backward=backward)


class Adapted(nn.Module):
    """Frozen layers with adapters that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(128, 128).requires_grad_(False) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(128, 8) for _ in range(4))
        self.up = nn.ModuleList(nn.Linear(8, 128) for _ in range(4))
        self.last = nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block, down, up in zip(self.blocks, self.down, self.up, strict=True):
            x = torch.tanh(block(x) + up(down(x)))
        return self.last(x)


def adapted(rank: int, world: int) -> None:
    expect_equal(Adapted, narrow_batch, rank, world)


def ordered(rank: int, world: int) -> None:
    """The first rank's order holds; in that of use fewer chunks are whole at a time, and bits are the same."""

    def as_used(model: nn.Module) -> list[nn.Parameter]:
        found = order_of_use(model, torch.zeros(1, 512, device=DEVICE))
        return found if rank == 0 else found[::-1]

    most = []
    for order in (None, as_used):
        expect_equal(Parallel, vector_batch, rank, world, chunk_numel=1 << 19, order=order)
        most.append(most_whole(*chunked(Parallel(), chunk_numel=1 << 19, order=order), vector_batch(rank)))
    assert most[1] < most[0], most


class Normed(nn.Module):
    """Batch norm's parameters are whole on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(128, 128), nn.BatchNorm1d(128), nn.Tanh(), nn.Linear(128, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def normed(rank: int, world: int) -> None:
    for backward in (once, accumulated):
        expect_equal(Normed, narrow_batch, rank, world, backward=backward)
    gradients_of_norms(rank, world)


def gradients_of_norms(rank: int, world: int) -> None:
    """After each backward the sum of means, as of every other parameter; updates do not show the last bit of it."""
    torch.manual_seed(0)
    plain = placed(Normed())
    model, _ = chunked(copy.deepcopy(plain))
    plain = Plain(plain, ADAMW).model
    norms = plain.get_submodule("layers.1"), model.get_submodule("layers.1")
    buffers = {name: one.clone() for name, one in plain.named_buffers()}
    sums: dict[str, torch.Tensor] = {}
    for number in range(3):
        of_ranks: dict[str, list[torch.Tensor]] = {}
        for other in range(world):
            plain.load_state_dict(buffers, strict=False)
            plain.zero_grad()
            loss_of(plain, batches_of(narrow_batch, number, other, world)[0]).backward()
            for name, one in norms[0].named_parameters():
                of_ranks.setdefault(name, []).append(one.grad)
        loss_of(model, batches_of(narrow_batch, number, rank, world)[0]).backward()
        for name, one in norms[1].named_parameters():
            mean = mean_of(of_ranks[name])
            sums[name] = mean if number == 0 else sums[name] + mean
            assert torch.equal(one.grad, sums[name]), (number, name)


def losses_of(model: nn.Module, optimizer: Any, rank: int, world: int, steps: range) -> list[torch.Tensor]:
    found = []
    for step in steps:
        optimizer.zero_grad()
        found.append(once(model, batches_of(narrow_batch, step, rank, world), lambda: None).detach())
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
    return found


def checkpointing(rank: int, world: int) -> None:
    """A training goes on from its state dicts: in other chunks, and on one rank alone."""
    torch.manual_seed(0)
    through = chunked(Routed())
    losses_of(*through, rank, world, range(2))
    model, state = copy.deepcopy(through[0].state_dict()), copy.deepcopy(through[1].state_dict())
    rest = losses_of(*through, rank, world, range(2, 4))
    torch.manual_seed(1)
    again = chunked(Routed(), chunk_numel=1 << 15 if world == 2 else None)
    again[0].load_state_dict(model)
    again[1].load_state_dict(state)
    assert all(map(torch.equal, rest, losses_of(*again, rank, world, range(2, 4))))
    alone = placed(Routed())
    optimizer = ADAMW(alone.parameters())
    alone.load_state_dict(model)
    optimizer.load_state_dict(state)
    one, its = torch_lms.chunked(alone, optimizer)
    for name, value in one.state_dict().items():
        assert torch.equal(value.cpu(), model[name].cpu()), name
    assert its.state_dict()["state"].keys() == state["state"].keys()
    for number, values in its.state_dict()["state"].items():
        for key, value in values.items():
            assert torch.equal(value.cpu(), state["state"][number][key].cpu()), (number, key)


def clipping(rank: int, world: int) -> None:
    """The norm is that of all gradients, on all ranks alike, and is scaled to what is allowed."""
    torch.manual_seed(0)
    plain = placed(Normed())
    model, optimizer = chunked(copy.deepcopy(plain))
    for norm_type in (2.0, 1.0, float("inf")):
        gradients: list[list[torch.Tensor | None]] = []
        reference = Plain(copy.deepcopy(plain), ADAMW)
        for of in range(world):
            reference.zero_grad()
            once(reference.model, batches_of(narrow_batch, 0, of, world), lambda: None)
            gradients.append([one.grad for one in reference.parameters])
        means = [mean_of(list(one)) for one in zip(*gradients, strict=True)]
        norms = torch.stack([torch.linalg.vector_norm(one.float(), norm_type) for one in means if one is not None])
        expected_norm = torch.linalg.vector_norm(norms, norm_type)
        optimizer.zero_grad()
        once(model, batches_of(narrow_batch, 0, rank, world), lambda: None)
        norm = optimizer.clip_grad_norm_(0.0625, norm_type)
        torch.testing.assert_close(norm, expected_norm, rtol=1e-4, atol=0)
        torch.testing.assert_close(
            optimizer.clip_grad_norm_(0.0625, norm_type).cpu(), torch.tensor(0.0625), rtol=1e-2, atol=0
        )
        everybody = [torch.zeros((), device=DEVICE) for _ in range(world)]
        dist.all_gather(everybody, norm)
        assert all(torch.equal(one, norm) for one in everybody)
