"""Wherever an interrupt ends a step or a backward, the model is usable, and parameters are their masters'."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # PyTorch's own name for it

import torch_lms.chunk
from tests.chunk.plain import Chunked, Plain
from tests.unit.trainings import one_thread

FOLDER = str(Path(torch_lms.chunk.__file__).parent)
X = torch.rand(16, 64, generator=torch.Generator().manual_seed(0))
CLASSES = torch.arange(16) % 8
EVERY = 83  # of the lines that run; it shares no factor with what loops run
MOST = 0.08  # that two steps of this learning rate change a number by
ADAMW = partial(torch.optim.AdamW, lr=1e-2)


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))


def backward(training: Plain | Chunked) -> None:
    training.zero_grad()
    F.cross_entropy(training.model(X.bfloat16()).float(), CLASSES).backward()


def interrupted(run: Callable[[], None], line: int) -> bool:
    """Whether `run` is interrupted by its line of that number, of all that this package runs."""
    left = line

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        left -= event == "line"
        if left == 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def expect_right(chunked: Chunked, plain: Plain) -> None:
    for master, parameter, other in zip(chunked.masters, chunked.parameters, plain.masters, strict=True):
        assert master is not None
        assert torch.equal(master.bfloat16(), parameter)
        assert (master - other).abs().max() < MOST  # as much as has been updated


@one_thread()
@pytest.mark.parametrize("then", ["step", "zero_grad", "call"])
@pytest.mark.parametrize("update_on", ["device", "host", "stream"])
def test_an_interrupt_anywhere_leaves_everything_usable(update_on: str, then: str) -> None:
    def train(training: Chunked) -> None:
        backward(training)
        training.step()

    plain = Plain(make(), ADAMW)
    for _ in range(2):
        backward(plain)
        plain.step()
    line, goes_on = 1, True
    while goes_on:
        chunked = Chunked(make(), ADAMW, update_on=update_on, chunk_numel=4096)
        train(chunked)
        goes_on = interrupted(partial(train, chunked), line)
        if then == "call":
            chunked.model(X)
        chunked.step() if then == "step" else chunked.zero_grad()
        expect_right(chunked, plain)
        train(chunked)
        expect_right(chunked, plain)
        line += EVERY
    assert line > 3 * EVERY


def test_a_model_whose_call_was_interrupted_can_be_called_at_once() -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    model = make()
    model, _ = torch_lms.chunked(model, ADAMW(model.parameters()))
    expected = model(X)
    handle = model[2].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(X)
    handle.remove()
    assert torch.equal(model(X), expected)
