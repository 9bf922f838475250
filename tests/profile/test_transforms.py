"""Forwards that call what `torch.func` makes of a function, or run a backward themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torch_lms._torch_compat import has_export
from torch_lms.errors import ProfileError
from torch_lms.profile import ProfileConfig, profile, trace

needs_export = pytest.mark.skipif(not has_export(), reason="this PyTorch has neither torch.export nor torch.func")
QUICK = ProfileConfig(warmup_runs=0, timed_runs=1, links=False)
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Mapped(nn.Module):
    """A layer, then a function of torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.func.vmap(torch.tanh)(self.layer(x))
        return found


@needs_export
def test_what_is_open_between_calls_has_no_graph() -> None:
    with pytest.raises(ProfileError, match=r"a transform of torch\.func"):
        trace(Mapped(), (torch.ones(2, 4),), sources=["export"])
    found = profile(Mapped(), torch.ones(2, 4), config=QUICK)
    assert found.level == "runtime"
    tanh = next(node for node in found.nodes if node.name == "tanh")
    assert tanh.inputs == ("linear",)
    assert torch.rand(2).shape == (2,)  # no transform is open


@needs_export
def test_what_is_open_between_calls_may_stay_whole() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), Mapped()), torch.ones(2, 4)
    traced = trace(model, (x,))
    assert traced.level == "module"
    assert traced.graph_module is not None
    assert torch.equal(traced.graph_module(x), model(x))


Body = Callable[[Any, torch.Tensor], torch.Tensor]


def energy(self: Any, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = self.inner(x).tanh().square().sum()
    return found


def transformed(self: Any, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.func.grad(lambda value: energy(self, value))(x)
    return found


def with_second_derivatives(self: Any, x: torch.Tensor) -> torch.Tensor:
    value, backward = torch.func.vjp(torch.tanh, self.inner(x))
    found: torch.Tensor = backward(value)[0] + torch.func.hessian(lambda one: energy(self, one))(x).sum((0, 1))
    return found


def forward_over_reverse(self: Any, x: torch.Tensor) -> torch.Tensor:
    slope = torch.func.grad(lambda value: self.inner(value).pow(3).sum())
    found: torch.Tensor = torch.func.jvp(slope, (x,), (x,))[1]
    return found


def forces(self: Any, x: torch.Tensor) -> torch.Tensor:
    if not x.requires_grad:
        x = x.requires_grad_()
    found: torch.Tensor = torch.autograd.grad(energy(self, x), x, create_graph=True)[0]
    return found


class Derived(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.body = nn.Linear(4, 4), body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


def gradients(run: Any, model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    found = run(X)
    found.square().sum().backward()
    return [found, *(parameter.grad for parameter in model.parameters())]


@needs_export
@pytest.mark.parametrize("body", [transformed, with_second_derivatives, forward_over_reverse, forces])
@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("around", [False, True])
def test_a_forward_that_runs_a_backward_is_profiled(body: Body, pieces: bool, around: bool) -> None:
    model: nn.Module = Derived(body)
    model = nn.Sequential(nn.Linear(4, 4), model, nn.Linear(4, 4)) if around else model
    before = gradients(model, model)
    graph = trace(model, (X,)).graph_module
    if graph is None and pieces:
        pytest.skip("no graph to run piece by piece")
    assert graph is None or all(map(torch.equal, gradients(graph, model), before))
    model.zero_grad()
    found = profile(model, X, config=ProfileConfig(pieces=pieces, warmup_runs=0, timed_runs=1, links=False))
    read = {name for node in found.nodes for name in (*node.parameters, *node.saved_parameters)}
    assert any(name.endswith("inner.weight") for name in read)
    assert found.saved_bytes >= X.nbytes
    assert all(map(torch.equal, gradients(model, model), before))
    with pytest.raises(RuntimeError, match="saved tensor hooks"), torch.autograd.graph.save_on_cpu():
        torch.func.grad(torch.sum)(X)  # refused as ever


def a_constant_gradient(self: Any, x: torch.Tensor) -> torch.Tensor:
    value = self.inner(x)
    found: torch.Tensor = value + torch.autograd.grad(value.square().sum(), value, retain_graph=True)[0]
    return found


@needs_export
def test_a_backward_whose_result_is_a_constant_has_no_graph() -> None:
    with pytest.raises(ProfileError, match="in a backward without create_graph"):
        trace(Derived(a_constant_gradient), (X,), sources=["export"])
