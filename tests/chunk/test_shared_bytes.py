"""Different tensors of a model that share bytes: chunks would part them, so they are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from tests.chunk.small_model import ADAMW, chunked
from tests.unit.error_messages import check_message
from torch_lms.errors import ChunkError


class Tied(nn.Module):
    """A head, and the embedding that it is to be tied to.

    Args:
        tie: does so.
    """

    def __init__(self, tie: Callable[[Tied], None]) -> None:
        super().__init__()
        self.emb = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        tie(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.emb(x))
        return found


def refusal_of(model: nn.Module, **options: str) -> str:
    before = [(one.dtype, one.untyped_storage()._cdata) for one in model.parameters()]
    with pytest.raises(ChunkError) as refused:
        chunked(model, **options)
    assert before == [(one.dtype, one.untyped_storage()._cdata) for one in model.parameters()]
    return str(refused.value)


def by_data(self: Tied) -> None:
    self.head.weight.data = self.emb.weight.data


def by_a_new_parameter(self: Tied) -> None:
    self.head.weight = nn.Parameter(self.emb.weight)


def by_a_frozen_one(self: Tied) -> None:
    self.head.weight = nn.Parameter(self.emb.weight.detach(), requires_grad=False)


def by_a_transposed_view(self: Tied) -> None:
    self.head = nn.Linear(16, 8, bias=False)
    self.head.weight.data = self.emb.weight.data.t()


def by_rows(self: Tied) -> None:
    both = torch.rand(24, 8)
    self.emb.weight.data, self.head.weight.data = both[:16], both[8:]


def by_columns(self: Tied) -> None:
    both = torch.rand(16, 15)
    self.emb.weight.data, self.head.weight.data = both[:, :8], both[:, 7:]


@pytest.mark.parametrize(
    "tie", [by_data, by_a_new_parameter, by_a_frozen_one, by_a_transposed_view, by_rows, by_columns]
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_that_share_bytes_are_named(tie: Callable[[Tied], None], device: str) -> None:
    with torch.device(device):
        model = Tied(tie)
    message = refusal_of(model, **({"device": "cpu"} if device == "meta" else {}))
    check_message(message, found="emb.weight and head.weight, which share theirs", do="(head.weight = emb.weight)")


def test_all_parameters_are_looked_at() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    model[3].bias.data = model[1].weight.data[2]
    assert re.search(r"found 1.weight and 3.bias", refusal_of(model))


def by_the_same_parameter(self: Tied) -> None:
    self.head.weight = self.emb.weight


def by_nothing(_: Tied) -> None:
    pass


def in_one_storage(self: Tied, *, dim: int) -> None:
    both = torch.rand(16, 8).repeat_interleave(2, dim)
    self.emb.weight.data, self.head.weight.data = both.split(both.shape[dim] // 2, dim)


def in_turns(self: Tied) -> None:
    both = torch.rand(16, 16)
    self.emb.weight.data, self.head.weight.data = both[:, ::2], both[:, 1::2]


@pytest.mark.parametrize(
    "tie", [by_the_same_parameter, by_nothing, partial(in_one_storage, dim=0), partial(in_one_storage, dim=1), in_turns]
)
def test_parameters_that_share_no_bytes_train_as_they_do_alone(tie: Callable[[Tied], None]) -> None:
    """As those of cuDNN's recurrent modules, which lie in one storage."""
    torch.manual_seed(0)
    model = Tied(tie)
    apart = [one.detach().clone() for one in model.parameters()]
    model, optimizer = chunked(model)
    assert (model.head.weight is model.emb.weight) == (tie is by_the_same_parameter)
    assert all(torch.equal(one, other.bfloat16()) for one, other in zip(model.parameters(), apart, strict=True))
    model(torch.arange(4)).float().sum().backward()
    optimizer.step()
    assert not any(torch.equal(one, other.bfloat16()) for one, other in zip(model.parameters(), apart, strict=True))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_of_no_elements_share_nothing(device: str) -> None:
    bytes_of_all = torch.rand(16, device=device)
    model = nn.Module()
    model.whole = nn.Parameter(bytes_of_all)
    model.some = nn.Parameter(bytes_of_all[:0])
    model.others = nn.Parameter(bytes_of_all[8:8])
    model.none = nn.Parameter(torch.empty(0, device=device))
    model.again = nn.Parameter(model.none.detach())
    chunked(model, **({"device": "cpu"} if device == "meta" else {}))
    assert [one.numel() for one in model.parameters()] == [16, 0, 0, 0, 0]


# --- buffers ---


def test_a_buffer_with_a_parameters_bytes_is_named() -> None:
    model = Tied(by_nothing)
    model.head.register_buffer("first", model.emb.weight.detach()[3])
    message = refusal_of(model)
    check_message(message, found="head.first, which shares those of the parameter emb.weight", do="clone()")
    model.head.first = model.head.first.clone()
    chunked(model)


def test_a_buffer_that_is_a_parameter_stays_one() -> None:
    model = Tied(by_nothing)
    model.head.register_buffer("same", model.emb.weight)
    model, optimizer = chunked(model)
    model(torch.arange(4)).float().sum().backward()
    optimizer.step()
    assert model.head.same is model.emb.weight


def test_buffers_that_share_bytes_still_do() -> None:
    model = Tied(by_nothing)
    model.register_buffer("one", torch.zeros(4))
    model.register_buffer("part", model.one[1:])
    model.register_buffer("sparse", torch.eye(2).to_sparse())  # which has no storage; embeddings have a switch so named
    model.register_buffer("later", nn.parameter.UninitializedBuffer())
    chunked(model)
    model.one.fill_(1)
    assert model.part.all()


def test_one_who_ties_as_told_is_not_refused_again() -> None:
    model = Tied(by_data)
    assert "head.weight = emb.weight" in refusal_of(model)
    model.head.weight = model.emb.weight
    chunked(model, ADAMW)
