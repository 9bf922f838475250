"""How a program whose model is spread over ranks fails, keeps within memory, and goes on later."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional as F  # noqa: N812  # PyTorch's own name for it

import torch_lms
from tests.chunk.plain import loss_of
from tests.chunk.spread import (
    ADAMW,
    batches_of,
    check_released,
    chunked,
    expected,
    once,
    save_path,
)
from tests.chunk.spread_models import Checkpointed, Normed, Routed, losses_of, narrow_batch
from tests.chunk.test_chunked import Owner, in_order
from tests.unit.trainings import MIN_BYTES, vector_batch
from torch_lms.chunk import ShardedState


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
    refused(
        "expected a DeviceMesh, found 3",
        lambda: torch_lms.chunked(model := Normed(), ADAMW(model.parameters()), mesh=3),  # type: ignore[arg-type]
    )
    model, optimizer = chunked(Checkpointed(reentrant=False))
    batch = narrow_batch(rank)
    refused("call the module that owns it", lambda: model.first.weight.sum().item())
    refused("call the module that owns it", lambda: F.linear(torch.ones(1, 128).bfloat16(), model.first.weight))
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


def in_other_groups(rank: int, world: int) -> None:
    """Some ranks are in process groups of their own besides; the last one has no part in the model."""
    dist.new_group([0])
    mesh = DeviceMesh("cpu", list(range(world - 1)))
    if rank < world - 1:
        torch.manual_seed(0)
        model = Normed()
        model, optimizer = torch_lms.chunked(model, ADAMW(model.parameters()), mesh=mesh)
        losses = losses_of(model, optimizer, rank, world - 1, range(2))
        assert all(one.isfinite() for one in losses)
    dist.barrier()


def beside_a_pipeline(rank: int, world: int) -> None:
    """Two stages of two ranks each train as the whole model on two ranks does."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "pp"))
    number, count = mesh.get_local_rank("pp"), mesh.size(1)

    def whole() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(2 * count)))

    def loss_of_two(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(y.float(), target) / 2

    part = whole()[2 * number : 2 * number + 2]
    part, optimizer = torch_lms.chunked(part, ADAMW(part.parameters()), mesh=mesh["dp"])
    stage = PipelineStage(part, number, count, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=loss_of_two, scale_grads=False)
    model = whole()
    model, of_model = torch_lms.chunked(model, ADAMW(model.parameters()), mesh=mesh["dp"])
    for step in range(3):
        torch.manual_seed(10 * step + mesh.get_local_rank("dp"))
        x, target = torch.randn(8, 128).bfloat16(), torch.randn(8, 128)
        for piece, wanted in zip(x.chunk(2), target.chunk(2), strict=True):
            loss_of_two(model(piece), wanted).backward()
        of_model.step()
        schedule.step(*((x,) if number == 0 else ()), target=target if number == count - 1 else None)
        optimizer.step()
    expected = list(model.state_dict().values())
    found = list(part.state_dict().values())
    assert all(map(torch.equal, found, expected[4 * number : 4 * number + len(found)]))


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
