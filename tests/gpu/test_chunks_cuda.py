"""Model data in chunks on CUDA: bit-equal to masters by hand, on device and host, with and without a limit."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import torch_lms
from tests.chunk.plain import Chunked, Plain, loss_of, train
from tests.unit.trainings import CLASSES, GPT, Batch

LAYERS, WIDTH, TOKENS = 6, 512, 256
STEPS = 6
ADAMW = partial(torch.optim.AdamW, lr=1e-3)


def make() -> nn.Module:
    torch.manual_seed(0)
    model = GPT(width=WIDTH, layers=LAYERS)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.cuda()


def batch(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(CLASSES, (8, TOKENS), generator=generator)
    return ids, torch.randint(CLASSES, (8 * TOKENS,), generator=generator)


def expected(update_on: str, **chosen: bool) -> list[list[torch.Tensor]]:
    """On the host, so that the limit is for what is compared with it alone."""
    plain = Plain(make(), partial(ADAMW, **chosen), on="cpu" if update_on == "host" else None)
    return [[one.cpu() for one in made] for made in train(plain, batch, STEPS)]


@pytest.mark.parametrize("update_on", ["device", "host", "stream"])
@pytest.mark.parametrize("chosen", [{}, {"fused": True}], ids=str)
@pytest.mark.parametrize("limit", [None, "400MiB"])
def test_training_is_bit_equal(update_on: str, chosen: dict[str, bool], limit: str | None, cleaned: None) -> None:
    wanted = expected(update_on, **chosen)
    if limit is not None:
        torch_lms.enable({"cuda": limit}, min_bytes="64KiB")
    chunked = Chunked(make(), partial(ADAMW, **chosen), update_on=update_on)
    for number, made in enumerate(train(chunked, batch, STEPS)):
        assert len(made) == len(wanted[number])
        for mine, other in zip(made, wanted[number], strict=True):
            assert torch.equal(mine.cpu(), other), f"step {number}"
    torch_lms.disable()


@pytest.mark.parametrize("update_on", ["device", "host", "stream"])
@pytest.mark.parametrize("limit", [None, "400MiB"])
def test_steps_in_backward_are_bit_equal(update_on: str, limit: str | None, cleaned: None) -> None:
    wanted = expected(update_on)
    if limit is not None:
        torch_lms.enable({"cuda": limit}, min_bytes="64KiB")
    chunked = Chunked(make(), ADAMW, update_on=update_on, step_in_backward=True)
    for number in range(STEPS):
        loss = loss_of(chunked.model, batch(number))
        loss.backward()
        chunked.step()
        assert torch.equal(loss.detach().cpu(), wanted[number][0])
    for master, other in zip(chunked.masters, wanted[-1][-len(chunked.masters) :], strict=True):
        assert torch.equal(master.cpu(), other)
    torch_lms.disable()
