"""Ranks that do not call `chunked` alike."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.chunk.plain import loss_of
from tests.chunk.spread import ADAMW, chunked
from tests.chunk.test_chunked import OPTIMIZERS
from torch_lms.errors import ChunkError

WIDTH = 32


def net(*more: nn.Module, width: int = WIDTH, **options: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, width), nn.Linear(width, WIDTH, **options), *more)


def expect_refused(error: str, model: nn.Module, optimize: Any = ADAMW, **options: Any) -> None:
    with pytest.raises(ChunkError, match=error):
        chunked(model, optimize, **options)
    assert {one.dtype for one in model.parameters()} == {torch.float32}


def unlike(rank: int, world: int) -> None:
    """Every rank hears what differs, and where."""

    def text(name: str, first: object, second: object) -> str:
        return f"alike, found {name}: {first} on rank 0, {second} on rank 1; pass the same"

    expect_refused(text("chunk_numel", 2048, 4096), net(), chunk_numel=4096 if rank else 2048)
    expect_refused(text("update_on", "host", "device"), net(), update_on="device" if rank else "host")
    expect_refused(text("reuse_gradients", True, False), net(), reuse_gradients=not rank)
    expect_refused(text("optimizer", "AdamW", "SGD"), net(), OPTIMIZERS["SGD"] if rank else ADAMW)
    shapes = [r"0.weight of shape \(32, 32\).*", r"0.weight of shape \(16, 32\).*"]
    expect_refused(text("parameter 0", *shapes), net(width=16 if rank else WIDTH))
    expect_refused(text("parameter 3", "1.bias of.*", "none"), net(bias=not rank))
    names = nn.Sequential(net()) if rank else net()
    expect_refused(text("parameter 0", "0.weight of.*", "0.0.weight of.*"), names)
    optimize = partial(torch.optim.AdamW, lr=0.1 if rank else 0.2)
    expect_refused(text("group 0", ".*lr=0.2.*", ".*lr=0.1.*"), net(), optimize)
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last if rank else torch.contiguous_format)
    expect_refused(text("parameter 0", r".*strides \(27, 9, 3, 1\).*", r".*strides \(27, 1, 9, 3\).*"), conv)
    frozen = net()
    frozen[0].bias.requires_grad_(not rank)
    expect_refused(text("parameter 1", ".*in group 0", ".*frozen"), frozen)
    buffered = net(nn.BatchNorm1d(WIDTH, affine=False, track_running_stats=not rank))
    expect_refused(text("buffer 0", "2.running_mean of.*", "none"), buffered)


def failing(rank: int, world: int) -> None:
    """What is refused on one rank is on all."""
    for error, options in [
        ("found torch.float16; leave dtype out", {"dtype": torch.float16 if rank else torch.bfloat16}),
        ("reuse_gradients to be True or False, found 'no'", {"reuse_gradients": "no" if rank else True}),
        ("room on .* for a chunk of", {"device_limit": 100 if rank else "1GiB"}),
    ]:
        expect_refused(
            error if rank else f"no error on any rank, found on rank 1 ChunkError.*{error}", net(), **options
        )


def alike(rank: int, world: int) -> None:
    """After all of that; only the first one's order counts, whoever gives one."""
    model, optimizer = chunked(net(), order=None if rank else lambda made: [made[1].weight])
    x = torch.randn(4, WIDTH)
    loss_of(model, (x, torch.arange(4))).backward()
    optimizer.step()
    assert optimizer.data.tensors[0].name == "1.weight"
