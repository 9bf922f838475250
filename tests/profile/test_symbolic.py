from __future__ import annotations

import builtins
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import arange, fx, nn

from torch_lms.profile import trace, tracing
from torch_lms.profile.arguments import bind_sample
from torch_lms.profile.attributes import Attributes
from torch_lms.profile.symbolic import SymbolicError, trace_symbolically


def asks(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


class Calling(nn.Module):
    """Calls something of the test's in the middle of its forward."""

    def __init__(self, call: Callable[[Any], Any]) -> None:
        super().__init__()
        self.call = [call]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.call[0](x)
        return x + torch.arange(3) if isinstance(x, torch.Tensor) else x


def symbolic(model: nn.Module, *args: Any) -> fx.GraphModule:
    return fx.GraphModule(model, trace_symbolically(model, bind_sample(model, args, {}), Attributes(model)))


def test_other_threads_see_python_and_pytorch_as_they_are() -> None:
    met, done = threading.Barrier(2, timeout=60), threading.Barrier(2, timeout=60)
    symbols: list[Any] = []
    original = torch.arange
    found: dict[str, Any] = {}

    def elsewhere() -> None:
        met.wait()
        found["isinstance"] = builtins.isinstance.__module__ == "builtins" and type(builtins.isinstance) is type(len)
        found["constructor"] = sys.modules["torch"].arange == original  # type: ignore[attr-defined]
        found["made here"] = type(torch.arange(3)), type(arange(3))
        found["asked here"] = asks(symbols[0]), asks(torch.ones(1))
        done.wait()

    def in_forward(x: Any) -> None:
        symbols.append(x)
        met.wait()
        done.wait()
        found["asked while tracing"] = asks(x)

    other = threading.Thread(target=elsewhere)
    other.start()
    graph_module = symbolic(Calling(in_forward), torch.ones(3))
    other.join()
    assert found == {
        "isinstance": True,
        "constructor": True,
        "made here": (torch.Tensor, torch.Tensor),
        "asked here": (False, True),
        "asked while tracing": True,
    }
    assert torch.equal(graph_module(torch.zeros(3)), torch.arange(3.0))


def test_names_of_the_model_s_modules_are_put_back_also_after_a_failure() -> None:
    before = dict(globals())

    def fail(_x: Any) -> None:
        raise ValueError("as asked")

    with pytest.raises(SymbolicError, match="as asked"):
        symbolic(Calling(fail), torch.ones(3))
    assert globals() == before
    assert "isinstance" not in globals()
    assert globals()["torch"] is sys.modules["torch"]


def test_threads_trace_one_after_the_other() -> None:
    made: list[fx.GraphModule] = []
    start = threading.Barrier(3, timeout=60)

    def trace_one() -> None:
        start.wait()
        made.append(symbolic(Calling(asks), torch.ones(3)))

    threads = [threading.Thread(target=trace_one) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [torch.equal(one(torch.zeros(3)), torch.arange(3.0)) for one in made] == [True] * 3
    assert "isinstance" not in globals()


def test_another_thread_makes_modules_while_a_model_is_traced() -> None:
    made: list[nn.Module] = []

    def make(_x: Any) -> None:
        other = threading.Thread(target=lambda: made.append(nn.BatchNorm1d(3)))
        other.start()
        other.join()

    symbolic(Calling(make), torch.ones(3))
    assert [len(list(module.buffers())) for module in made] == [3]


def test_another_thread_runs_modules_while_a_model_is_traced() -> None:
    """Its own, and those of the model that is traced."""
    layer, batch_norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
    x, found = torch.ones(2, 3), []

    def run(_x: Any) -> None:
        other = threading.Thread(target=lambda: found.extend([layer(x), batch_norm(x), layer.weight]))
        other.start()
        other.join()

    model = Calling(run)
    model.inner = batch_norm
    symbolic(model, torch.ones(3))
    assert [type(one) for one in found] == [torch.Tensor, torch.Tensor, nn.Parameter]
    assert torch.equal(found[0], layer(x))


class Made(nn.Module):
    """Makes tensors by each way to a constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.make = torch.zeros

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import torch as inside  # not a name of this file

        return x + torch.arange(x.shape[-1]) + arange(x.shape[-1]) + inside.ones(1) + self.make(3)


def test_constructors_become_nodes_by_whatever_name_they_are_called() -> None:
    graph_module = symbolic(Made(), torch.ones(2, 3))
    targets = [node.target for node in graph_module.graph.nodes if node.op == "call_function"]
    assert [targets.count(function) for function in (torch.arange, torch.ones, torch.zeros)] == [2, 1, 1]
    x = torch.rand(4, 3)
    assert torch.equal(graph_module(x), Made()(x))


class Unions(nn.Module):
    """Asks for unions and nested tuples of classes."""

    def forward(self, x: Any) -> torch.Tensor:
        if isinstance(x, torch.Tensor | None) and isinstance(x, (int, (torch.Tensor, str))):
            return x * 2
        return x * 3


def test_a_symbol_is_of_every_class_that_a_tensor_is_of() -> None:
    x = torch.ones(2)
    assert torch.equal(symbolic(Unions(), x)(x), x * 2)


class Drawing(nn.Module):
    """A layer, and a number that Python draws."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x) * random.random()
        return found


def test_a_trace_looks_once_at_attributes_and_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (looks.append(function.__name__), function(*args))[1]

    model = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(5)))
    monkeypatch.setattr(random, "getstate", counted(random.getstate))
    monkeypatch.setattr(tracing, "Attributes", counted(Attributes))
    assert trace(model, (torch.ones(2, 3),), sources=["symbolic"]).graph_module is not None
    assert looks == ["Attributes", "getstate", "getstate"]  # of numbers before and after


def test_the_module_that_draws_is_named() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(Drawing(), nn.Linear(3, 3)))
    with pytest.raises(SymbolicError) as caught:
        symbolic(model, torch.ones(2, 3))
    assert caught.value.path == "1.0"
    traced = trace(model, (torch.ones(2, 3),), sources=["opened"])
    assert traced.graph_module is not None
    assert "1.0" in [node.target for node in traced.graph_module.graph.nodes]
