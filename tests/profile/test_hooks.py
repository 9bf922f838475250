from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torch_lms._torch_compat import has_export
from torch_lms.errors import ProfileError
from torch_lms.profile.constraints import STATISTICS, find_constraints, written_attributes
from torch_lms.profile.random_draws import draws
from torch_lms.profile.tracing import TracedModel, trace

needs_export = pytest.mark.skipif(not has_export(), reason="this PyTorch has no torch.export")
GRAPHS = ["symbolic", *(pytest.param(one, marks=needs_export) for one in ("export", "recorded"))]
X = torch.arange(12.0).view(3, 4) / 10


class Net(nn.Module):
    """A block, and layers around it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.block(self.first(x))
        return found


class Called(Net):
    """Does something before its forward."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = super().__call__(x * 2)
        return found


def graph_of(traced: TracedModel) -> Any:
    assert traced.graph_module is not None
    return traced.graph_module


def hooked(register: Callable[[Net], Any], kind: type[Net] = Net) -> Net:
    model = kind()
    register(model)
    return model


def after(model: Net) -> Any:
    return model.register_forward_hook(lambda _module, _given, found: found * 2)


def before(model: Net) -> Any:
    return model.register_forward_pre_hook(lambda _module, given: (given[0] * 2,))


def doubled(_module: nn.Module, given: Any, *_rest: Any) -> Any:
    return tuple(None if one is None else one * 2 for one in given)


def backward(module: nn.Module) -> Any:
    return module.register_full_backward_hook(doubled)


@pytest.mark.parametrize("source", GRAPHS)
@pytest.mark.parametrize(
    "make", [lambda: hooked(after), lambda: hooked(before), Called], ids=["hook", "pre-hook", "__call__"]
)
def test_a_graph_does_what_a_call_of_the_model_does(source: str, make: Callable[[], Net]) -> None:
    model = make()
    assert torch.equal(graph_of(trace(model, (X,), sources=[source]))(X), model(X))


@needs_export
def test_a_compiled_model_is_traced_as_it_is_written() -> None:
    model = Net()
    model.compile(backend="eager")
    model.block.compile(backend="eager")
    traced = trace(model, (X,), sources=["symbolic"])
    assert {str(node.target) for node in graph_of(traced).graph.nodes} >= {"first", "block.0", "block.1"}
    assert model._compiled_call_impl is not None


@pytest.mark.parametrize("name", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_a_module_with_hooks_in_its_backward_stays_whole(name: str) -> None:
    if not hasattr(nn.Module, name):
        pytest.skip("this PyTorch has no such hooks")
    model = hooked(lambda model: getattr(model.block, name)(doubled))
    traced = trace(model, (X,))
    assert any("kept whole" in note and "block" in note for note in traced.notes)
    model(X).sum().backward()
    expected = model.first.weight.grad
    model.zero_grad(set_to_none=True)
    graph_of(traced)(X).sum().backward()
    assert expected is not None
    assert torch.equal(model.first.weight.grad, expected)


@pytest.mark.parametrize("source", GRAPHS)
def test_hooks_in_the_backward_of_the_model_itself_are_refused(source: str) -> None:
    with pytest.raises(ProfileError, match=r"without hooks for its backward .* the Net itself"):
        trace(hooked(backward), (X,), sources=[source])


@needs_export
@pytest.mark.parametrize("source", ["export", "recorded"])
def test_hooks_in_the_backward_of_an_opened_module_are_refused(source: str) -> None:
    with pytest.raises(ProfileError, match=r"without hooks for its backward .* 'block'"):
        trace(hooked(lambda model: backward(model.block)), (X,), sources=[source])


class Twice(Net):
    """Calls a layer twice, with another between."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.first(self.block(self.first(x)))
        return found


def counting(model: Net) -> None:
    """A hook that works with a buffer of the layer."""
    model.first.register_buffer("count", torch.zeros(()))
    model.first.register_forward_hook(lambda layer, _given, found: found * layer.count.add_(1))


def spectral(model: Net) -> None:
    nn.utils.spectral_norm(model.first)


def parametrized(model: Net) -> None:
    nn.utils.parametrizations.spectral_norm(model.first)


@pytest.mark.parametrize("change", [counting, spectral, parametrized])
def test_calls_of_a_layer_whose_buffers_change_by_a_hook_are_in_one_stage(change: Callable[[Net], Any]) -> None:
    graph_module = graph_of(trace(hooked(change, Twice), (X,)))
    modules = dict(graph_module.named_modules(remove_duplicate=False))
    found = find_constraints(graph_module.graph, modules)
    assert any(one.why == STATISTICS for one in found)


def test_a_hooked_layer_may_draw_and_write_what_no_layer_of_pytorch_does() -> None:
    plain, other = (graph_of(trace(model, (X,))) for model in (Twice(), hooked(counting, Twice)))
    for graph_module, expected in ((plain, False), (other, True)):
        modules = dict(graph_module.named_modules(remove_duplicate=False))
        calls = [node for node in graph_module.graph.nodes if node.target == "first"]
        assert [draws(node, modules) for node in calls] == [expected] * 2
        assert any("first.weight" in names for names in written_attributes(graph_module.graph, modules).values()) == (
            expected
        )
