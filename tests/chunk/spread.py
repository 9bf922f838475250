"""What ranks do whose model is spread over them: run by ``tests.pipeline.ranks``."""

from __future__ import annotations

import copy
import gc
import os
import signal
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F  # noqa: N812  # PyTorch's own name for it
from torch.utils.checkpoint import checkpoint

import torch_lms
from tests.chunk.plain import Optimize, Plain, loss_of
from tests.chunk.test_chunked import OPTIMIZERS, Owner, in_order
from tests.chunk.test_order import Parallel
from tests.unit.trainings import MIN_BYTES, TRAININGS, Batch, vector_batch
from torch_lms.chunk import ShardedState, order_of_use, streamed_updates
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
            assert one.parameter.untyped_storage().nbytes() == 0


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


def refusals(rank: int, world: int) -> None:
    """What cannot be is said so, and what has failed can be done again."""
    torch.manual_seed(0)

    def refused(error: str, call: Callable[[], Any]) -> None:
        with pytest.raises((RuntimeError, ValueError), match=error):
            call()

    refused("treats each element of a tensor alone", lambda: chunked(Normed(), partial(torch.optim.Adafactor, lr=1e-2)))
    refused("expected torch.bfloat16 over several ranks", lambda: chunked(Normed(), dtype=torch.float16))
    refused("found step_in_backward=True", lambda: chunked(Normed(), step_in_backward=True))
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp", "pp"))
    refused(
        "expected a mesh of one dimension",
        lambda: torch_lms.chunked(model := Normed(), ADAMW(model.parameters()), mesh=mesh),
    )
    model, optimizer = chunked(Checkpointed(reentrant=False))
    batch = narrow_batch(rank)
    refused("call the module that owns it", lambda: model.first.weight.sum().item())
    refused("call the module that owns it", lambda: model.blocks[0][0].weight.data_ptr())
    losses = losses_of(model, optimizer, rank, world, range(1))
    once(model, [batch], lambda: None)
    refused("call optimizer.clip_grad_norm_", lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    refused("call optimizer.clip_grad_norm_", lambda: model.first.weight.grad.sum().item())
    optimizer.zero_grad()

    def fail(*_: Any) -> None:
        raise ValueError("on purpose")

    for where in (model.blocks[2].register_forward_hook, model.blocks[2].register_full_backward_hook):
        handle = where(fail)
        refused("on purpose", lambda: once(model, [batch], lambda: None))
        handle.remove()
        optimizer.zero_grad()
    state = model.state_dict()
    again = chunked(Checkpointed(reentrant=False))
    again[0].load_state_dict(state)
    again[1].load_state_dict(optimizer.state_dict())
    mine, others = (losses_of(*one, rank, world, range(1, 3)) for one in ((model, optimizer), again))
    assert all(map(torch.equal, mine, others)), (losses, mine, others)
    refused("expected gradients without graphs", lambda: loss_of(model, batch).backward(create_graph=True))


def dying(rank: int, world: int) -> None:
    """One rank is killed; the others are told, not left waiting."""
    model, optimizer = chunked(Routed())
    losses_of(model, optimizer, rank, world, range(1))
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        losses_of(model, optimizer, rank, world, range(1, 3))
    except RuntimeError as error:
        print("told:", type(error).__name__)
        os._exit(7)


def memory(rank: int, world: int) -> None:
    """Between steps a rank has its part of everything, and nothing whole."""
    torch.manual_seed(0)
    model, optimizer = chunked(Owner(in_order, parts=12))
    losses = once(model, batches_of(vector_batch, 0, rank, world), lambda: None)
    optimizer.step()
    numel = sum(one.numel() for one in model.parameters())
    found = optimizer._data.allocated_bytes()
    assert sum(found.values()) <= 14 * numel / world * 1.05, (losses, found, numel)


def within_a_limit(rank: int, world: int) -> None:
    """What a rank keeps is paged by automatic mode, whose limit has room for less; what is gathered comes on top."""
    torch.manual_seed(0)
    make = partial(Owner, in_order, parts=12)
    wanted = [
        (losses[rank], [one.detach().clone() for one in reference.masters])
        for losses, reference in expected(make(), ADAMW, vector_batch, world)
    ]
    gc.collect()
    torch_lms.swap.count_cpu_allocations()
    before_bytes = torch_lms.stats().allocated_bytes
    model = make()
    numel = sum(one.numel() for one in model.parameters())
    limit_bytes = before_bytes + 10 * numel // world  # of 14
    torch_lms.enable({"cpu": limit_bytes}, min_bytes=MIN_BYTES)
    model, optimizer = chunked(model)
    for step, (loss, _) in enumerate(wanted):
        torch_lms.stats(reset=True)
        torch.manual_seed(step)
        found = once(model, batches_of(vector_batch, step, rank, world), lambda: None).detach()
        assert torch.equal(found, loss), (step, found, loss)
        optimizer.step()
        counted = torch_lms.stats()
        assert counted.peak_allocated_bytes <= limit_bytes, (step, counted)
        assert counted.pageout_bytes > 0, (step, counted)
        assert counted.limit_exceeded == 0, (step, counted)
    torch_lms.disable()
    check_released(optimizer)
    for one, master in zip(model.state_dict().values(), wanted[-1][1], strict=True):
        assert torch.equal(one, master)


def save_path() -> str:
    return str(Path(urlsplit(sys.argv[4]).path).with_name("checkpoint"))


def saving(rank: int, world: int) -> None:
    """Saves in the middle of a training, which it tells the rest of; then somebody is killed."""
    torch.manual_seed(0)
    model, optimizer = chunked(Routed())
    losses_of(model, optimizer, rank, world, range(2))
    dcp.save({"training": ShardedState(model, optimizer)}, checkpoint_id=save_path())
    expected_state = model.state_dict(), optimizer.state_dict()
    rest = losses_of(model, optimizer, rank, world, range(2, 4))
    torch.save((rest, *expected_state), f"{save_path()}.{rank}")
    dist.barrier()
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)


def resuming(rank: int, world: int) -> None:
    """On any number of ranks there is what was saved; on as many, training goes on as it would have."""
    torch.manual_seed(1)
    model, optimizer = chunked(Routed(), chunk_numel=None if world == 2 else 1 << 15)
    dcp.load({"training": ShardedState(model, optimizer)}, checkpoint_id=save_path())
    rest, saved, state = torch.load(f"{save_path()}.{min(rank, 1)}")
    for name, value in model.state_dict().items():
        assert torch.equal(value, saved[name]), name
    found = optimizer.state_dict()
    assert found["param_groups"] == state["param_groups"]
    for number, values in state["state"].items():
        for key, value in values.items():
            assert torch.equal(found["state"][number][key], value), (number, key)
    if world == 2:
        assert all(map(torch.equal, rest, losses_of(model, optimizer, rank, world, range(2, 4))))
    else:
        losses_of(model, optimizer, rank, world, range(2, 4))


def resuming_alone(rank: int, world: int) -> None:
    """One process without ranks, and a plain model, have what two ranks have saved."""
    _, saved, state = torch.load(f"{save_path()}.0")
    torch.manual_seed(1)
    made = Routed()
    model, optimizer = torch_lms.chunked(made, ADAMW(made.parameters()))
    dcp.load({"training": ShardedState(model, optimizer)}, checkpoint_id=save_path())
    plain = Routed().state_dict()
    dcp.load({"training": {"model": plain}}, checkpoint_id=save_path())
    for name, value in saved.items():
        assert torch.equal(model.state_dict()[name], value), name
        assert torch.equal(plain[name], value), name
    for number, values in state["state"].items():
        for key, value in values.items():
            assert torch.equal(optimizer.state_dict()["state"][number][key], value), (number, key)
    losses_of(model, optimizer, rank, world, range(2, 4))


# --- what once went wrong -----------------------------------------------------------------------------------


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
    for run in (None, two_in_a_checkpoint, both_kinds_of_checkpoint, several_times):
        for backward in (once, accumulated, retained, both, zeroed_between):
            for chunk_numel in (1280, 4096):  # a layer in each, or three
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
    for make in makers:
        for backward in (once, accumulated, retained, both):
            for chunk_numel in (2432, 5000):
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
            for dtype in (torch.int16, torch.bool, torch.complex64, torch.float64):
                self.register_buffer(str(dtype).split(".")[1], torch.full((3,), 1 + rank).to(dtype))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale * F.linear(self.conv(x).mean((2, 3)), self.turned) + self.nothing.sum()

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
