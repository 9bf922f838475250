"""Models whose forward changes their own tensors, or runs in a mode: stages do in each step what the model does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from torch_lms._torch_compat import has_export
from torch_lms.balanced import BalanceConfig, create_balanced_partition
from torch_lms.errors import PartitionError, ProfileError
from torch_lms.profile.constraints import COMPUTED
from torch_lms.profile.profiler import ProfileConfig, profile
from torch_lms.profile.tracing import TracedModel, trace
from torch_lms.stages.cutting import split
from torch_lms.stages.running import Stages

Body = Callable[[Any, torch.Tensor], torch.Tensor]


class State(nn.Module):
    """Layers around a body that uses buffers, a plain tensor and parameters."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 2.0, 1.0, 0.0]))
        self.plain = torch.ones(4)
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.body(self, self.first(x)).tanh())
        return found


def count_by_method(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.count.add_(1)
    return x * self.count


def count_by_operator(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.count += 1
    return x * self.count


def count_by_out(self: Any, x: torch.Tensor) -> torch.Tensor:
    torch.add(self.count, 1, out=self.count)
    return x * self.count.clone()


def write_item(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.mean[1:] = self.mean[1:] + 1
    self.mean[0] += 2
    return x + self.mean


def write_to_view(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.mean.view(2, 2)[0].add_(1)
    return x + self.mean.clone()


def write_data(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.mean.data.add_(1)
    return x + self.mean.clone()


def running_mean(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.mean.mul_(0.5).add_(x.detach().mean(0))
    return x + self.mean.clone()


def buffers_alone(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.add(self.mean, self.count) + self.mask[:4].sum() + torch.stack([self.mean, self.mask[1:]])[0]


def buffer_in_parts(self: Any, x: torch.Tensor) -> torch.Tensor:
    first, *_ = self.mask
    return x + first + sum(row for row in self.mask) + len(self.mask) + self.mask.shape[0] + self.mean.new_ones(4)


def change_plain(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.plain.add_(1)
    return x * self.plain.clone()


def all_parameters(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x * sum(one.pow(2).sum() for one in self.parameters())


def another_name(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    z, size = y, x.shape[1]
    same = size
    y += 1
    size += 1
    return z * same + size


def scaled_weight(self: Any, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, self.first.weight.data.mul_(0.5))


def mean_without_gradient(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        self.mean.lerp_(x.mean(0), 0.5)
    return x + self.mean.clone()


def weight_without_gradient(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        self.last.weight.mul_(0.5)
    return x * 2


def norm_without_gradient(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        norm = x.norm()
    return x / norm


def cast(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return self.first(x).float()


def not_cast(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return x @ self.first.weight


class Tripled(torch.autograd.Function):
    """Its backward is not that of what its forward does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3


TRIPLED = Tripled.apply


def own_function(self: Any, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = TRIPLED(x)
    return found


def assign_buffer(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.count = self.count + 1
    return x * self.count


def assign_plain(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.plain = self.plain + 1
    return x * self.plain


def read_value(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if self.count > 1 else x


def read_plain_value(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x * float(self.plain[0])


BY_ANY = [
    *(count_by_method, count_by_operator, count_by_out, write_item, running_mean, buffers_alone, buffer_in_parts),
    *(another_name,),
]
BY_ALL_BUT = {
    write_to_view: (),
    write_data: ("export",),
    change_plain: ("recorded",),
    all_parameters: (),
    scaled_weight: ("export",),
}
BY_EXPORT = [mean_without_gradient, weight_without_gradient, norm_without_gradient, cast, not_cast]
BY_NONE = [own_function, assign_buffer, assign_plain]

SOURCES = ["symbolic", "opened", *(["export", "recorded"] if has_export() else [])]
X = [torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


def cases() -> Iterator[Any]:
    for source in SOURCES:
        for body in [*BY_ANY, *BY_ALL_BUT, *(BY_EXPORT if source == "export" else ())]:
            if source not in BY_ALL_BUT.get(body, ()):
                yield pytest.param(source, body, id=f"{source}-{body.__name__}")


def refusals() -> Iterator[Any]:
    for source in SOURCES:
        by_values = [read_value, read_plain_value] if source in ("symbolic", "opened") else []
        for body in [*BY_NONE, *(BY_EXPORT if source != "export" else ()), *by_values]:
            yield pytest.param(source, body, id=f"{source}-{body.__name__}")


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    plain = {"plain": model.plain} if isinstance(model, State) else {}
    return {**dict(model.named_parameters()), **dict(model.named_buffers()), **plain}


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    own = tensors_of(found)
    for name, value in tensors_of(expected).items():
        if name in own:  # a plain tensor that no stage reads is in none
            assert torch.equal(own[name], value), name
            assert (own[name].grad is None) == (value.grad is None), name
            assert value.grad is None or torch.equal(own[name].grad, value.grad), name


def assert_train_alike(stages: Stages, own: State) -> None:
    """Three steps, and buffers of another state between the first two."""
    for step, x in enumerate(X[1:]):
        outputs = []
        for model in (own, stages):
            model.zero_grad(set_to_none=True)
            outputs.append(model(x))
            outputs[-1].square().sum().backward()
        assert torch.equal(*outputs)
        assert_same(stages, own)
        if step == 0:
            state = {name: value.detach() * 2 + 1 for name, value in own.state_dict().items()}
            own.load_state_dict(copy.deepcopy(state))
            stages.load_state_dict(state, strict=False)  # torch.fx's copies take plain tensors for persistent ones


def cut(found: TracedModel, at: int) -> Stages:
    assert found.graph_module is not None
    names = [node.name for node in found.graph_module.graph.nodes if node.op in COMPUTED]
    return Stages(split(found, {name: int(place >= at) for place, name in enumerate(names)}, model=found.model))


@pytest.mark.parametrize(("source", "body"), list(cases()))
def test_each_cut_that_is_allowed_trains_as_the_model_does(source: str, body: Body) -> None:
    found = trace(State(body), (X[0],), sources=[source])
    assert found.graph_module is not None
    assert_same(found.model, State(body))
    allowed = 0
    for at in range(1, sum(node.op in COMPUTED for node in found.graph_module.graph.nodes)):
        try:
            stages = cut(copy.deepcopy(found), at)
        except PartitionError:
            continue
        assert_train_alike(stages, State(body))
        allowed += 1
    assert allowed > 0


@pytest.mark.parametrize(("source", "body"), list(cases()))
def test_a_profile_leaves_the_model_as_it_was(source: str, body: Body) -> None:
    model = State(body)
    config = ProfileConfig(warmup_runs=1, timed_runs=1, links=False, progress=False, sources=(source,))
    profile(model, X[0], config=config)
    assert_same(model, State(body))


@pytest.mark.parametrize(("source", "body"), list(refusals()))
def test_what_a_source_cannot_say_it_refuses_and_undoes(source: str, body: Body) -> None:
    model = State(body)
    with pytest.raises(ProfileError):
        trace(model, (X[0],), sources=[source])
    assert_same(model, State(body))
    assert vars(model).keys() == vars(State(body)).keys()
    assert type(model.plain) is torch.Tensor
    assert torch.equal(model(X[0]), State(body)(X[0]))  # neither autocast nor modules are as while tracing


@pytest.mark.parametrize("body", [count_by_method, *([mean_without_gradient] if has_export() else [])])
def test_a_balanced_partition_trains_as_the_model_does(body: Body) -> None:
    config = BalanceConfig(profile=ProfileConfig(warmup_runs=1, timed_runs=1, links=False, progress=False))
    stages = create_balanced_partition(State(body), ["cpu", "cpu"], X[0], config=config)
    assert_train_alike(stages, State(body))


def test_what_no_source_can_say_is_an_error_that_names_the_line() -> None:
    with pytest.raises(ProfileError, match=r"assigns others to \['count'\]; write to them"):
        trace(State(assign_buffer), (X[0],), sources=[one for one in SOURCES if one != "runtime"])


def test_what_a_forward_notes_for_its_owner_is_no_obstacle() -> None:
    def noted(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.seen = x
        return x * 2

    model = State(noted)
    model(X[0])  # there is one already
    before = model.seen
    for source in SOURCES:
        found = trace(model, (X[0],), sources=[source])
        assert model.seen is before
        assert found.graph_module is not None
        assert torch.equal(found.graph_module(X[1]), State(noted)(X[1]))
