"""Forwards that note in plain attributes what they do, and go another way in their next call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torch_lms._torch_compat import has_export
from torch_lms.errors import ProfileError
from torch_lms.profile.tracing import trace

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
SOURCES = ["symbolic", *(["export", "recorded"] if has_export() else [])]
Body = Callable[[Any, torch.Tensor], torch.Tensor]


class Counting(nn.Module):
    """Knows how often it was called, and whether."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.layer, self.body = nn.Linear(4, 4), body
        self.calls, self.called, self.first, self.noted = 0, False, None, {"calls": 0}
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, self.layer(x))


def counts(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.calls += 1
    return x * 2 if self.calls == 1 else x


def flags(self: Any, x: torch.Tensor) -> torch.Tensor:
    found = x if self.called else x.exp()
    self.called = True
    return found


def notes(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.first = "then" if self.first else "now"
    return x * 2 if self.first == "now" else x


def has(self: Any, x: torch.Tensor) -> torch.Tensor:
    if hasattr(self, "made"):
        return x
    self.made = 1
    return x * 2


def in_a_dict(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.noted["calls"] += 1
    return x * 2 if self.noted["calls"] == 1 else x


def in_a_list(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.seen.append(len(self.seen))
    return x * 2 if len(self.seen) == 1 else x


def decays(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.calls += 1
    return x * 0.5**self.calls


def decays_by_a_constant(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.calls += 1
    return x * torch.tensor([float(self.calls)])


def state(model: nn.Module) -> Any:
    return {name: repr(value) for name, value in vars(model).items() if not name.startswith("_")}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("body", [counts, flags, notes, has, in_a_dict, in_a_list, decays, decays_by_a_constant])
def test_a_forward_that_does_something_else_in_its_next_call_has_no_graph(body: Body, source: str) -> None:
    model = Counting(body)
    before = state(model)
    with pytest.raises(
        ProfileError, match="expected a forward that does the same in each call, found one that changes"
    ):
        trace(model, (X,), sources=[source])
    assert state(model) == before


# On PyTorch 1.12 a graph has no place for what torch.Tensor makes.
_legacy = torch.Tensor if hasattr(torch, "compiler") else torch.tensor


def only_counts(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.calls += 1
    self.called, self.noted["calls"] = True, self.calls
    if self.calls == 1:
        self.first = "told"
    self.last = x
    return x * torch.tensor([2.0]) + _legacy([1.0])


@pytest.mark.parametrize("source", SOURCES)
def test_a_forward_that_only_counts_has_a_graph(source: str) -> None:
    if source == "recorded":
        pytest.skip("a run has no such constants")
    model = Counting(only_counts)
    expected, before = Counting(only_counts), state(model)
    expected.load_state_dict(model.state_dict())
    graph_module = trace(model, (X,), sources=[source]).graph_module
    assert graph_module is not None
    assert torch.equal(graph_module(X), expected(X))
    assert state(model) == before


def test_a_module_that_counts_stays_whole() -> None:
    model, twin = (nn.Sequential(nn.Linear(4, 4), Counting(counts), nn.Linear(4, 4)) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    graph_module = trace(model, (X,), sources=["opened"]).graph_module
    assert graph_module is not None
    for _ in range(3):
        assert torch.equal(graph_module(X), twin(X))
