"""Parts of a model that ran without gradient or under autocast go to other devices with the rest of it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torch_lms._torch_compat import has_export
from torch_lms.profile.devices import made_on
from torch_lms.profile.profiler import ProfileConfig, profile
from torch_lms.profile.regions import Region
from torch_lms.profile.tracing import TracedModel, trace
from torch_lms.stages.cutting import split
from torch_lms.stages.materialize import materialize
from torch_lms.stages.running import run_stages
from torch_lms.stages.stage import Stage

pytestmark = pytest.mark.skipif(not has_export(), reason="this PyTorch has no torch.export")

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
COPIES = [list, copy.deepcopy, lambda stages: pickle.loads(pickle.dumps(stages))]


class Modes(nn.Module):
    """A part without gradient, in it one without autocast, in that one with gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        with torch.no_grad():
            at = torch.arange(4, device=x.device).float()
            noise = torch.rand(4, device=x.device)
            with torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False):
                scale = (at.double() * 2).to(x.device, torch.float32)
                with torch.enable_grad():
                    z = self.second(y) * torch.ones(4, device=x.device)
        return y * scale + z + noise


class WithConstant(Modes):
    """The graph has a constant that is not the model's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)


def traced_on(device: str, kind: type[Modes] = Modes) -> TracedModel:
    torch.manual_seed(0)
    return trace(kind().to(device), (X.to(device),), sources=("export",))


def cut(found: TracedModel) -> list[Stage]:
    graph = found.graph_module.graph  # type: ignore[union-attr]
    names = [node.name for node in graph.nodes if node.op in ("call_function", "call_module")]
    return split(found, {name: int(place > 0) for place, name in enumerate(names)}, model=found.model)


@pytest.mark.parametrize("copied", COPIES)
def test_regions_run_where_their_stage_is(copied: Callable[[Any], list[Stage]]) -> None:
    found = traced_on("cpu")
    stages = copied([materialize(stage, "meta") for stage in cut(found)])
    assert run_stages(stages, X).is_meta
    for stage in stages:
        stage.to_empty(device="cpu")
        stage.load_state_dict(found.model.state_dict(), strict=False)
    torch.manual_seed(1)
    expected = found.model(X)
    torch.manual_seed(1)
    assert torch.equal(run_stages(stages, X), expected)


@pytest.mark.parametrize("copied", COPIES)
def test_regions_traced_without_values_run_with_them(copied: Callable[[Any], list[Stage]]) -> None:
    torch.manual_seed(0)
    own = Modes()
    stages = copied([materialize(stage, "cpu", state_dict=own.state_dict()) for stage in cut(traced_on("meta"))])
    for _ in range(2):  # random numbers are new ones each time
        seed = torch.random.get_rng_state()
        expected = own(X)
        expected.sum().backward()
        torch.random.set_rng_state(seed)
        output = run_stages(stages, X)
        assert torch.equal(output, expected)
        output.sum().backward()
    gradients = {name: parameter.grad for stage in stages for name, parameter in stage.named_parameters()}
    for name, parameter in own.named_parameters():
        assert parameter.grad is not None
        assert gradients[name] is not None
        assert torch.equal(gradients[name], parameter.grad)


def test_a_stage_leaves_the_regions_of_its_trace_where_they_are() -> None:
    found = traced_on("cpu")
    for stage in cut(found):
        materialize(stage, "meta")
    torch.manual_seed(1)
    expected = found.model(X)
    torch.manual_seed(1)
    assert torch.equal(run_stages(cut(found), X), expected)


def test_gradients_stay_on_after_an_error_in_a_region() -> None:
    graph_module = traced_on("cpu").graph_module
    assert graph_module is not None
    region = next(module for module in graph_module.modules() if isinstance(module, Region))
    with pytest.raises(TypeError):
        region(X, X, X, X)
    assert torch.is_grad_enabled()


def test_autocast_is_that_of_the_device() -> None:
    graph_module = traced_on("cpu").graph_module
    assert graph_module is not None
    assert any(isinstance(inner, Region) for region in graph_module.children() for inner in region.children())

    def kinds() -> set[Any]:
        regions = [module for module in graph_module.modules() if isinstance(module, Region)]
        return {given for region in regions for given in region._arguments if isinstance(given, str)}

    assert kinds() == {"cpu"}
    with made_on(graph_module, torch.device("cpu"), torch.device("cuda", 0)):
        assert kinds() == {"cuda"}
    assert kinds() == {"cpu"}


class _Devices(TorchDispatchMode):
    """Notes the devices that ops are told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: set[tuple[str, torch.device]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket.__name__)
        self.told |= {(name, value) for value in (kwargs or {}).values() if isinstance(value, torch.device)}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("traced_before", [True, False])
@pytest.mark.parametrize("pieces", [True, False])
def test_a_profile_makes_all_tensors_on_its_device(pieces: bool, traced_before: bool) -> None:
    found = traced_on("cpu")
    model = found if traced_before else found.model
    quick = ProfileConfig(
        warmup_runs=0, timed_runs=1, device="cpu:1", pieces=pieces, links=False, progress=False, sources=("export",)
    )
    with _Devices() as devices:
        profile(model, X, config=quick)
    makers = {"arange", "rand", "ones"}
    assert {name for name, device in devices.told if device == torch.device("cpu", 1)} >= makers
    assert not any("assert" in name for name, _ in devices.told)


def test_a_step_is_recorded_on_another_device_than_that_of_the_trace() -> None:
    from torch_lms.fitting.step import record_step  # PyTorch 1.12 cannot

    found = traced_on("cpu", WithConstant)
    step = record_step(found, torch.device("meta"), None, fake=True)
    assert {"arange", "rand", "ones"} <= {op.name.rpartition("::")[2].partition(".")[0] for op in step.ops}
