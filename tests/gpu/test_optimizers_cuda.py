"""PyTorch's default optimizers on CUDA, in pieces where their tensors exceed the limit: the same bits, all fits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torch_lms
from tests.unit.optimizer_kinds import OPTIMIZERS, ListLengths

LAYERS = 16
WIDTH = 2048
PARAMETER_BYTES = LAYERS * WIDTH * WIDTH * 4  # 256 MiB


def train(name: str, dtype: torch.dtype, **choice: bool) -> tuple[list[torch.Tensor], list[int]]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(WIDTH, WIDTH, device="cuda", dtype=dtype)) for _ in range(LAYERS)]
    parameters += [nn.Parameter(torch.randn(width, device="cuda", dtype=dtype)) for width in (1, 3, 1000, 70_001)]
    kind, arguments = OPTIMIZERS[name]
    optimizer = kind(parameters, **arguments, **choice)
    lengths = ListLengths()
    norms = []
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        with lengths:
            norms.append(nn.utils.clip_grad_norm_(parameters, 10.0))
            optimizer.step()
    state = [value for of_one in optimizer.state.values() for value in of_one.values() if torch.is_tensor(value)]
    return [tensor.detach().cpu() for tensor in (*norms, *parameters, *state)], lengths.seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_default_goes_in_pieces_and_is_bit_equal(name: str, dtype: torch.dtype, cleaned: None) -> None:
    check(name, dtype)


@pytest.mark.parametrize("choice", [{"fused": True}, {"foreach": True}, {"capturable": True}], ids=str)
@pytest.mark.parametrize("name", ["adam with amsgrad", "adamw"])
def test_what_was_chosen_goes_in_pieces_and_is_bit_equal(name: str, choice: dict[str, bool], cleaned: None) -> None:
    check(name, torch.float32, **choice)


def check(name: str, dtype: torch.dtype, **choice: Any) -> None:
    whole, whole_lengths = train(name, dtype, **choice)
    assert max(whole_lengths) == LAYERS + 4
    torch_lms.enable({"cuda": PARAMETER_BYTES * dtype.itemsize // 4 * 5 // 4}, min_bytes="64KiB")
    made, lengths = train(name, dtype, **choice)
    torch_lms.disable()
    assert max(lengths) <= 5
    assert len(made) == len(whole)
    assert all(torch.equal(mine, other) for mine, other in zip(made, whole, strict=True))
