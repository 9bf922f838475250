from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from torch_lms._torch_compat import has_export
from torch_lms.balanced import BalanceConfig, create_balanced_partition
from torch_lms.errors import PartitionError, ProfileError
from torch_lms.partition.link_spec import LinkSpec
from torch_lms.profile.tracing import TracedModel, trace

pytestmark = pytest.mark.skipif(not has_export(), reason="function modes of this PyTorch do not see all calls")
X = torch.arange(12.0).view(3, 4) / 10


class Reading(nn.Module):
    """Layers, a choice between them that depends on data, and whatever else a test wants."""

    def __init__(self, last: Callable[[nn.Module, torch.Tensor], Any] = lambda self, x: x) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)])
        self.register_buffer("offset", torch.ones(4))
        self.last = last

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
            if x.sum() > 100:  # the user's line
                break
        return self.last(self, x + self.offset)


def recorded(model: nn.Module, *args: Any) -> TracedModel:
    found = trace(model, args, sources=["recorded"])
    assert found.level == "recorded"
    assert found.graph_module is not None
    return found


def rows(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([row * index for index, row in enumerate(x)])


def in_place(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[0] = 2.0
    y += self.offset
    y.mul_(3).T.add_(1)
    torch.add(y.detach(), 1, out=torch.empty_like(y))
    return y


def several(self: nn.Module, x: torch.Tensor) -> dict[str, Any]:
    largest = x.max(dim=1)
    one, (two, three) = x[:1], x.split([1, 2])
    return {"largest": largest.values, "rest": [one @ two.T, three.mean(), len(x), x.shape[0]]}


def counted(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    chosen = (x > 1).nonzero()
    for _ in range(len(chosen)):
        x = x + 1
    return x[x > 2].sum() + int(chosen.shape[0]) + x.new_zeros(3).sum() + 2 ** x.dim()


def made_here(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x + torch.arange(x.shape[1]) + functional.dropout(torch.ones_like(x), 0.5, True)


def routed(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    chosen = (x[:, 0] > 0).nonzero()[:, 0]
    return x.index_add(0, chosen, self.layers[0][0](x[chosen]))


@pytest.mark.parametrize("last", [rows, in_place, several, counted, made_here, routed])
def test_the_graph_does_what_the_model_does(last: Callable[..., Any]) -> None:
    model = Reading(last)
    graph = recorded(model, X).graph_module
    own = copy.deepcopy(model)
    for run in (model, graph):
        torch.manual_seed(1)
        assert run is not None
        made = run(X.clone())
        wanted = own if run is graph else None
        if wanted is not None:
            torch.manual_seed(1)
            expected = own(X.clone())
            torch.testing.assert_close(made, expected, rtol=0, atol=0)


def test_another_branch_is_an_error_that_names_the_line() -> None:
    model = Reading()
    graph = recorded(model, X).graph_module
    assert graph is not None
    model.layers[0][1].forward = lambda x: x + 1e4
    with pytest.raises(ProfileError, match=r"expected False .* found True.*test_recorded.*the user's line"):
        graph(X)


def test_another_count_is_an_error() -> None:
    graph = recorded(Reading(counted), X).graph_module
    assert graph is not None
    with pytest.raises(ProfileError, match=r"reads a value in Python"):
        graph(-10 * X)


def test_the_model_is_as_it_was() -> None:
    model = Reading(in_place)
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    found = recorded(model, X)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any("forward" in vars(module) for module in model.modules())
    assert found.shapes == {"x": ((3, 3), (4, 4))}
    assert any("Reading" in note or "recorded in one run" in note for note in found.notes)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


ELSEWHERE = torch.ones(4)


def hooked(_self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x.register_hook(lambda gradient: gradient * 2)
    return x + 1


def frozen(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return self.layers[0][0](x)


@torch.inference_mode()
def inferring(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return self.layers[0][0](x)


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (frozen, "some under torch.no_grad"),
        (inferring, "another mode of its own"),
        (lambda self, x: torch.from_numpy(x.detach().numpy()), "numpy hands a tensor"),
        (lambda self, x: Twice.apply(x) + 1, "a torch.autograd.Function"),
        (lambda self, x: Twice.apply(x), "a torch.autograd.Function"),
        (hooked, "a hook changes a value's gradient"),
        (lambda self, x: x + ELSEWHERE, "not made by a call of PyTorch's"),
    ],
)
def test_what_cannot_be_seen_is_refused(last: Callable[..., Any], words: str) -> None:
    with pytest.raises(ProfileError, match=re.escape(words)):
        trace(Reading(last), (X,), sources=["recorded"])


def test_without_a_graph_of_operators_one_run_is_recorded() -> None:
    found = trace(Reading(), (X,))
    assert found.level == "recorded"
    assert any("the user's line" in note for note in found.notes)


def test_stages_of_a_recorded_model_train_as_it_does() -> None:
    model = Reading(in_place)
    own = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="one of a single run"):
        stages = create_balanced_partition(model, ["cpu", "cpu"], X, config=BalanceConfig(links=LinkSpec()))
    expected = own(X.clone())
    expected.sum().backward()
    found = stages(X.clone())
    found.sum().backward()
    assert len(stages) == 2
    assert torch.equal(found, expected)
    for name, parameter in own.named_parameters():
        assert torch.equal(stages.get_parameter(name).grad, parameter.grad), name
    with pytest.raises(PartitionError, match=r"expected 'x' of shape \[3, 4\]"):
        stages(torch.ones(2, 4))
