"""What a forward changes besides its outputs is as it was after all that runs a model."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from torch_lms._torch_compat import has_export
from torch_lms.errors import ProfileError
from torch_lms.profile.profiler import ProfileConfig, profile
from torch_lms.profile.tracing import trace

if has_export():
    from torch_lms.fitting import FitConfig, fit

QUICK = ProfileConfig(warmup_runs=0, timed_runs=1, links=False, progress=False)
X = torch.arange(12).view(3, 4)


class Net(nn.Module):
    """An embedding with a layer behind it, and whatever a test does between the two."""

    def __init__(self, between: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(12, 4)
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.generator = torch.Generator()
        self.count, self.last = 0, None
        self.log: list[Any] = ["begin"]
        self.queue: deque[Any] = deque([1], maxlen=2)
        self.cache: dict[str, Any] = {"a": 1, "b": 2}
        self.names = {"a"}
        self.between = [between]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(self.between[0](self, self.embed(ids)))
        return found


def assigns(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.count += 1
    net.last = net.made = x
    net.mean = net.mean * 0.9 + x.detach().mean((0, 1))
    return x


def collects(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.log.append(x)
    net.queue.append(x)
    net.cache["b"] = net.cache["c"] = x
    net.cache.pop("a", None)
    net.names.clear()
    return x


def writes(net: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        net.layer.weight.mul_(0.5)
    return x


def writes_once(net: Net, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(net, "scale"):
        net.scale = torch.full((4,), 2.0)
    return x * net.scale


def norms_a_weight(net: Net, x: torch.Tensor) -> torch.Tensor:
    return x + functional.embedding(X % 4, net.layer.weight, max_norm=0.1)


def draws(net: Net, x: torch.Tensor) -> torch.Tensor:
    return x * random.random() * float(np.random.rand())


def draws_from_its_own(net: Net, x: torch.Tensor) -> torch.Tensor:
    return x + torch.randn(3, 4, 4, generator=net.generator)


def reads_a_value(net: Net, x: torch.Tensor) -> torch.Tensor:
    return norms_a_weight(net, assigns(net, collects(net, x))) if x.sum() > -1e9 else x


def fails(net: Net, x: torch.Tensor) -> torch.Tensor:
    raise ValueError(f"after {assigns(net, collects(net, writes(net, x))).shape}")


def state_of(net: Net) -> list[Any]:
    """All that may have changed, things that are compared by what they are by their number."""
    tensors = [tensor.tolist() for tensor in net.state_dict().values()]
    held = [list(one) for one in (net.log, net.queue, net.cache.items(), net.names)]
    own = [id(one) for one in (net.log, net.queue, net.cache, net.names, net.mean)]
    states = [random.getstate(), np.random.get_state()[2], net.generator.get_state().tolist()]
    return [tensors, held, own, states, net.count, net.last, sorted(vars(net))]


WAYS: dict[str, Callable[[Net], Any]] = {
    "profile": lambda net: profile(net, X, config=QUICK),
    "profile as it runs": lambda net: profile(net, X, config=replace(QUICK, sources=("runtime",))),
    "fit": lambda net: fit(net, X, limit="1GiB", config=FitConfig(profile=QUICK)),
    **{source: lambda net, source=source: trace(net, (X,), sources=[source]) for source in ("symbolic", "runtime")},
    **{source: lambda net, source=source: trace(net, (X,), sources=[source]) for source in ("export", "recorded")},
}


def skip_unless_there(way: str) -> None:
    if way in ("fit", "export", "recorded") and not has_export():
        pytest.skip(f"there is no {way} with this PyTorch")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "between",
    [assigns, collects, writes, norms_a_weight, draws, draws_from_its_own, reads_a_value, fails],
)
def test_the_model_is_left_as_it_was(between: Callable[..., torch.Tensor], way: str) -> None:
    skip_unless_there(way)
    net = Net(between)
    before = state_of(net)
    with contextlib.suppress(ProfileError):
        WAYS[way](net)
    assert state_of(net) == before


@pytest.mark.parametrize("way", ["profile", "profile as it runs", "fit"])
def test_a_weight_that_its_embedding_keeps_small_is_left_as_it_was(way: str) -> None:
    skip_unless_there(way)
    net = Net(lambda _net, x: x)
    net.embed.max_norm = 0.1
    before = state_of(net)
    WAYS[way](net)
    assert state_of(net) == before


@pytest.mark.parametrize("way", ["profile", "profile as it runs", "fit"])
def test_what_a_first_run_makes_is_there_in_the_next_ones(way: str) -> None:
    skip_unless_there(way)
    net = Net(writes_once)
    WAYS[way](net)
    assert not hasattr(net, "scale")


@pytest.mark.skipif(not has_export(), reason="this PyTorch makes no such graph")
def test_a_generator_that_only_the_graph_knows_is_left_as_it_was() -> None:
    generator = torch.Generator()
    before = generator.get_state()
    model = Net(lambda _net, x: x + torch.randn(3, 4, 4, generator=generator))
    try:
        torch.export.export(model, (X,), strict=False)
    except NotImplementedError as error:
        pytest.skip(f"this PyTorch's graphs have no generators: {error}")
    generator.set_state(before)
    found = profile(model, X, config=QUICK)
    assert found.level == "operator"
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("source", ["symbolic", *(["export", "recorded"] if has_export() else [])])
def test_a_graph_has_no_numbers_that_python_drew(source: str) -> None:
    with pytest.raises(ProfileError, match="expected random numbers of PyTorch alone"):
        trace(Net(draws), (X,), sources=[source])


def test_a_module_that_draws_in_python_stays_whole() -> None:
    model = nn.Sequential(nn.Embedding(12, 4), nn.Linear(4, 4))
    model.add_module("net", Net(draws))
    model.net.embed = nn.Identity()
    traced = trace(model, (X,))
    assert traced.level == "module"
    assert any("Python's" in note for note in traced.notes)
    assert traced.graph_module is not None
    assert len({traced.graph_module(X).sum().item() for _ in range(3)}) == 3
