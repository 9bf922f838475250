"""What ranks keep of a model: all of them or none; what an optimizer counts for tensors of one element, as it is."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.chunk import test_no_room, test_one_element
from tests.chunk.spread import DEVICE, batches_of, chunked, expect_equal, once, save_path
from tests.chunk.test_chunked import OPTIMIZERS
from tests.unit.trainings import vector_batch
from torch_lms.chunk import ShardedState, streamed_updates
from torch_lms.errors import ChunkError


def no_room(rank: int, world: int) -> None:
    """It runs out on one rank; all are told, and keep their models."""
    model = test_no_room.make().to(DEVICE)
    before = [one.clone() for one in model.parameters()]
    error = RuntimeError("on purpose")
    last = rank == world - 1
    fails = test_no_room.failing_at(5, error) if last else nullcontext()
    found = "on purpose" if last else f"found on rank {world - 1} RuntimeError: on purpose"
    with fails, pytest.raises(ChunkError, match=f"expected room for chunks of .*{found}"):
        chunked(model, chunk_numel=1 << 12)
    assert all(map(torch.equal, model.parameters(), before))
    assert not any(one._post_accumulate_grad_hooks for one in model.parameters())
    expect_equal(test_one_element.make, vector_batch, rank, world)


def one_element(rank: int, world: int) -> None:
    streamed_updates._PORTION_NUMEL = 1 << 11
    for name in ("SGD with momentum", "AdamW"):
        for update_on in ("device", "host", "stream"):
            options = {"update_on": update_on, "optimize": OPTIMIZERS[name]}
            expect_equal(test_one_element.make, vector_batch, rank, world, **options)


def losses_of(model: nn.Module, optimizer: Any, rank: int, world: int, steps: range) -> list[torch.Tensor]:
    found = []
    for step in steps:
        optimizer.zero_grad()
        found.append(once(model, batches_of(vector_batch, step, rank, world), lambda: None).detach())
        optimizer.step()
    return found


def one_element_saved(rank: int, world: int) -> None:
    """Of both kinds of state dicts; a plain optimizer loads the first."""
    through = chunked(test_one_element.make())
    losses_of(*through, rank, world, range(2))
    dcp.save({"training": ShardedState(*through)}, checkpoint_id=save_path())
    model, state = copy.deepcopy(through[0].state_dict()), copy.deepcopy(through[1].state_dict())
    plain = OPTIMIZERS["AdamW"](test_one_element.make().parameters())
    plain.load_state_dict(state)
    for one, kept in plain.state.items():
        assert kept["step"].shape == ()
        assert kept["step"] == 2
        assert kept["exp_avg"].shape == one.shape
    loaded, sharded = (chunked(test_one_element.make(), chunk_numel=1 << 16) for _ in range(2))
    loaded[0].load_state_dict(model)
    loaded[1].load_state_dict(state)
    dcp.load({"training": ShardedState(*sharded)}, checkpoint_id=save_path())
    expected = losses_of(*through, rank, world, range(2, 4))
    for again in (loaded, sharded):
        assert all(map(torch.equal, expected, losses_of(*again, rank, world, range(2, 4))))
        assert "step" not in again[1].data.allocated_bytes()
