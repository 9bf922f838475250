"""What programs do with a model that is spread over ranks, as it once went wrong."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn import functional as F  # noqa: N812  # PyTorch's own name for it
from torch.utils.checkpoint import checkpoint

from tests.chunk.plain import loss_of
from tests.chunk.spread import (
    DEVICE,
    accumulated,
    chunked,
    expect_equal,
    most_whole,
    once,
    placed,
    retained,
    save_path,
)
from tests.unit.trainings import Batch
from torch_lms.chunk import ShardedState

WIDTH = 32


def tiny_batch(step: int) -> Batch:
    torch.manual_seed(step)
    return torch.randn(4, WIDTH), torch.randint(0, WIDTH, (4,))


class Net(nn.Module):
    """Blocks between two layers, each in a chunk of its own; `run` may use them otherwise."""

    def __init__(self, run: Callable[[Net, torch.Tensor], torch.Tensor] | None = None, blocks: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.through(self.first(x)) if self.run is None else self.run(self, x))

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def two_in_a_checkpoint(net: Net, x: torch.Tensor) -> torch.Tensor:
    def pair(y: torch.Tensor, at: int) -> torch.Tensor:
        return torch.tanh(net.blocks[at + 1](torch.tanh(net.blocks[at](y))))

    x = net.first(x)
    for at in (0, 2):
        x = checkpoint(pair, x, at, use_reentrant=True)
    return x


def several_times(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.through(net.through(net.first(x)))


def both_kinds_of_checkpoint(net: Net, x: torch.Tensor) -> torch.Tensor:
    """The same blocks in both: one kind tells of its calls when they run, the other when they run again."""
    x = net.first(x)
    for reentrant in (True, False, True):
        for block in net.blocks[:2]:
            x = torch.tanh(checkpoint(block, x, use_reentrant=reentrant))
    return x


def both(model: nn.Module, batches: Sequence[Batch], after: Callable[[], None]) -> torch.Tensor:
    """The loss of two forwards, and then that of one more."""
    loss = loss_of(model, batches[0]) + loss_of(model, batches[1])
    loss.backward()
    after()
    return once(model, batches[:1], after)


def zeroed_between(model: nn.Module, batches: Sequence[Batch], after: Callable[[], None]) -> torch.Tensor:
    loss = loss_of(model, batches[0])
    model.zero_grad()
    loss = loss + loss_of(model, batches[1])
    loss.backward()
    after()
    return loss


def odd_uses(rank: int, world: int) -> None:
    for place, run in enumerate((None, two_in_a_checkpoint, both_kinds_of_checkpoint, several_times)):
        for turn, backward in enumerate((once, accumulated, retained, both, zeroed_between)):
            chunk_numel = (1280, 4096)[(place + turn) % 2]  # a layer in each, or three: with each run and each backward
            expect_equal(partial(Net, run), tiny_batch, rank, world, backward=backward, chunk_numel=chunk_numel)


class Beside(nn.Module):
    """A block that is given what others are given, too, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(2 * WIDTH, WIDTH)
        self.table = nn.Embedding(4, WIDTH)

    def forward(self, x: torch.Tensor, beside: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        bias = self.table(torch.arange(4, device=x.device))  # needs nothing that the block is called with
        return x + bias + torch.tanh(self.both(torch.cat((x, beside), 1))), beside


class Decoder(nn.Module):
    """Each block is called with what the first layer has made, which gets its gradient last of all."""

    def __init__(self, blocks: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Beside() for _ in range(blocks))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        beside = self.first(x)
        x = beside.tanh()
        for block in self.blocks:
            x, beside = block(x, beside)
        return self.last(x)


class Skipping(Decoder):
    """As an U-Net: layers are called with what earlier ones have made, the last with that of the first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [x := self.first(x)]
        for block in self.blocks[:4]:
            made.append(x := block(x, x.sin())[0])
        for block in self.blocks[4:]:
            x = block(x, made.pop())[0]
        return self.last(x)


def one_in_a_checkpoint(net: Net, x: torch.Tensor) -> torch.Tensor:
    x = net.first(x)
    for block in net.blocks:
        x = checkpoint(block, x, use_reentrant=True)
    return x.tanh()


def ends_early(rank: int, world: int) -> None:
    """A unit's backward has ended when that of what it was called with goes on, whoever else was called with it."""
    run = one_in_a_checkpoint
    makers: list[Callable[[], nn.Module]] = [Decoder, Skipping, partial(Net, run, blocks=12)]
    for place, make in enumerate(makers):
        for turn, backward in enumerate((once, accumulated, retained, both)):
            chunk_numel = (2432, 5000)[(place + turn) % 2]  # with each model and each backward
            expect_equal(make, tiny_batch, rank, world, backward=backward, chunk_numel=chunk_numel)
        model, optimizer = chunked(make(), chunk_numel=2432)
        assert optimizer.data.layout.chunks >= 6
        for step in range(2):  # the second knows what is used next
            most = most_whole(model, optimizer, tiny_batch(10 * step + rank))
            assert most <= 4, (make, step, most)


class NormedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, track_running_stats=True)) for _ in range(2)
        )
        self.blocks = nn.ModuleList([Choosing(self.experts)])
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.blocks[0](self.first(x)))


class Choosing(nn.Module):
    def __init__(self, experts: nn.ModuleList) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[int(x.sum().item() > 0)](x)


def normed_experts(rank: int, world: int) -> None:
    for backward in (once, accumulated):
        expect_equal(NormedExperts, tiny_batch, rank, world, backward=backward)


class Attending(nn.Module):
    """Modules that own parameters and use their children's, and parameters that are passed to modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4)
        self.asking = nn.Parameter(torch.randn(1, WIDTH))
        self.blocks = nn.ModuleList(nn.Bilinear(WIDTH, WIDTH, WIDTH) for _ in range(2))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        for block in self.blocks:
            x = x + block(x, self.asking.expand_as(x)).tanh()
        return self.last(x)


def attending(rank: int, world: int) -> None:
    for backward in (once, accumulated):
        expect_equal(Attending, tiny_batch, rank, world, backward=backward)
        expect_equal(Attending, tiny_batch, rank, world, backward=backward, chunk_numel=1 << 16)
    model, _ = chunked(Attending())
    state = {name: value + 1 for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def gradients_by_hand(rank: int, world: int) -> None:
    """Gradients of inputs are right; those that the program assigns are refused; a failed backward leaves no trace."""
    torch.manual_seed(0)
    plain = placed(Net()).bfloat16()
    model, optimizer = chunked(copy.deepcopy(plain).float(), chunk_numel=1280)
    x = tiny_batch(rank)[0].to(DEVICE).bfloat16()
    found, other = (
        torch.autograd.grad(one(given).sum(), given)[0]
        for one, given in ((model, x.clone().requires_grad_()), (plain, x.clone().requires_grad_()))
    )
    assert torch.equal(found, other)
    optimizer.zero_grad()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    with pytest.raises(RuntimeError, match="expected gradients that backward has made"):
        optimizer.step()
    optimizer.zero_grad()

    def fail(_: torch.Tensor) -> None:
        raise ZeroDivisionError

    good = loss_of(model, tiny_batch(rank))
    y = model.first(x)
    y.register_hook(fail)
    bad = model.last(y).sum()
    with pytest.raises(ZeroDivisionError):
        bad.backward()
    before = model.state_dict()
    good.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    optimizer.step()
    assert not any(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def unlike_ranks(rank: int, world: int) -> None:
    """Ranks that have gathered other chunks are told before anything is updated."""
    model, optimizer = chunked(Net(), chunk_numel=1280)
    before = model.state_dict()
    loss = loss_of(model, tiny_batch(rank))
    optimizer.data.gathered._trail += rank  # as if it had been another
    loss.backward()
    with pytest.raises(RuntimeError, match="expected all ranks to call the same units"):
        optimizer.step()
    optimizer.zero_grad()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    losses_of_tiny = once(model, [tiny_batch(rank)], lambda: None)
    optimizer.step()
    assert losses_of_tiny.isfinite()


def nothing_leaks(rank: int, world: int) -> None:
    """A step leaves no more objects behind than the one before; a model that nobody has any more is gone."""
    model, optimizer = chunked(Net(), chunk_numel=1280)
    counts = []
    for step in range(8):
        loss_of(model, tiny_batch(step))
        once(model, [tiny_batch(step)], lambda: None)
        optimizer.step()
        gc.collect()
        counts.append(len(gc.get_objects()))
    assert counts[-1] - counts[-4] < 20, counts
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None


def kinds_of_tensors(rank: int, world: int) -> None:
    """Parameters and buffers of many kinds; the optimizer's rate begins at zero."""

    class Kinds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
            self.turned = nn.Parameter(torch.randn(8, 5).t())
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.nothing = nn.Parameter(torch.empty(0, 4))
            self.listed = nn.ModuleList([nn.ParameterList([torch.ones(5)]), nn.Linear(5, 5)])
            for dtype in (torch.int16, torch.bool, torch.complex64, torch.float64):
                self.register_buffer(str(dtype).split(".")[1], torch.full((3,), 1 + rank).to(dtype))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.scale * F.linear(self.conv(x).mean((2, 3)), self.turned) + self.nothing.sum()
            return self.listed[1](y * self.listed[0][0])

    torch.manual_seed(0)
    model, optimizer = chunked(Kinds())
    assert int(model.get_buffer("int16")[0]) == 1
    x = torch.randn(2, 3, 8, 8).to(DEVICE)
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
    dcp.save({"training": ShardedState(model, optimizer)}, checkpoint_id=save_path())
    expected_state = model.state_dict()
    again = chunked(Kinds(), chunk_numel=1 << 13)
    dcp.load({"training": ShardedState(*again)}, checkpoint_id=save_path())
    assert all(torch.equal(value, expected_state[name]) for name, value in again[0].state_dict().items())
    with pytest.raises(RuntimeError, match="treats each element of a tensor alone"):
        chunked(Net(), partial(torch.optim.Adafactor, lr=0.0))


def partly_optimized(rank: int, world: int) -> None:
    """Parameters that get gradients and are not the optimizer's are as those that get none."""
    states = []
    for frozen in (False, True):
        torch.manual_seed(0)
        model = Net()
        others = [one for one in model.parameters() if one is not model.blocks[1].weight]
        model.blocks[1].weight.requires_grad_(not frozen)
        model, optimizer = chunked(model, lambda _, others=others: torch.optim.AdamW(others), chunk_numel=1280)
        for step in range(3):
            once(model, [tiny_batch(10 * step + rank)], lambda: None)
            optimizer.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
        states.append(model.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


class Clamped(nn.Linear):
    """Keeps its own weight small."""

    on = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if Clamped.on:
            with torch.no_grad():
                self.weight.clamp_(-0.01, 0.01)
        return super().forward(x)


def writes(rank: int, world: int) -> None:
    """What the program writes to parameters would be lost: it is told, and nothing has changed."""

    def build() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        net = Net()
        net.blocks[1] = Clamped(WIDTH, WIDTH)
        net.blocks.append(nn.Sequential(nn.Linear(WIDTH, WIDTH), Renormed()))
        return chunked(net, chunk_numel=1280)

    Clamped.on = Renormed.on = False
    undisturbed, (model, optimizer) = build(), build()

    def refused(text: str) -> None:
        with pytest.raises(RuntimeError, match=text):
            once(model, [tiny_batch(rank)], lambda: None)
        optimizer.zero_grad()

    Clamped.on = True
    refused(r"found blocks.1.weight written to while its module ran")
    Clamped.on, Renormed.on = False, True
    refused(r"found blocks.4.1.table.weight written to while its module ran")
    Renormed.on = False
    zeros = torch.zeros(sum(one.numel() for one in model.parameters()), device=DEVICE, dtype=torch.bfloat16)
    nn.utils.vector_to_parameters(zeros, [model.first.weight])
    refused(r"found first.weight with other bytes")
    for trained, stepped in (undisturbed, (model, optimizer)):
        once(trained, [tiny_batch(rank)], lambda: None)
        stepped.step()
    expected_state = undisturbed[0].state_dict()
    assert all(torch.equal(value, expected_state[name]) for name, value in model.state_dict().items())


class Renormed(nn.Module):
    """Adds an embedding whose rows are made shorter as they are looked up."""

    on = True

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table.max_norm = 0.5 if Renormed.on else None
        return x + self.table(torch.arange(4, device=x.device))
