from __future__ import annotations

import inspect
import keyword
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn.utils import parametrize

from tests.profile.models import (
    Asking,
    Branching,
    Convolutions,
    Fresh,
    Nested,
    OneBranching,
    Quiet,
    TiedLM,
)
from torch_lms._torch_compat import has_export
from torch_lms.errors import ProfileError
from torch_lms.profile import ProfilingInterpreter, TracedModel, trace
from torch_lms.profile.ownership import module_of

needs_export = pytest.mark.skipif(not has_export(), reason="this PyTorch has no torch.export")
SOURCES = ["symbolic", pytest.param("export", marks=needs_export)]
IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


def graph_of(traced: TracedModel) -> Any:
    assert traced.graph_module is not None
    return traced.graph_module


def line_of_the_branch() -> str:
    lines, start = inspect.getsourcelines(Branching)
    offset = next(index for index, line in enumerate(lines) if "the user's line" in line)
    return f"{inspect.getsourcefile(Branching)}:{start + offset}"


@pytest.mark.parametrize("source", SOURCES)
def test_graph_gives_what_the_model_gives(source: str) -> None:
    model = TiedLM()
    traced = trace(model, (IDS, 2.0), {"mixed": True}, sources=[source])
    assert traced.level == "operator"
    other = IDS.flip(0)
    found = graph_of(traced)(*traced.arguments((other, 2.0), {"mixed": True}))
    assert torch.equal(found["logits"], model(other, 2.0, mixed=True)["logits"])


@pytest.mark.parametrize("source", SOURCES)
def test_parameters_are_the_models_own_under_their_own_names(source: str) -> None:
    model = TiedLM()
    graph_module = graph_of(trace(model, (IDS,), sources=[source]))
    own = dict(model.named_parameters())
    for name, parameter in graph_module.named_parameters():
        assert parameter is own[name]
    assert set(graph_module.state_dict()) <= set(model.state_dict())
    assert graph_module.scale is model.scale


@pytest.mark.parametrize("source", SOURCES)
def test_a_tied_parameter_is_read_under_its_first_name(source: str) -> None:
    class Functional(TiedLM):
        def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return torch.nn.functional.linear(self.mix(self.embed(ids_BT)), self.head.weight)

    graph = graph_of(trace(Functional(), (IDS,), sources=[source])).graph
    read = {node.target for node in graph.nodes if node.op == "get_attr"}
    assert "embed.weight" in read
    assert "head.weight" not in read


class Hooked(nn.Module):
    """A hook changes the gradient of a value, here or in what stays whole where modules are nodes."""

    def __init__(self, *, within: bool) -> None:
        super().__init__()
        self.layer = Hooked(within=False) if within else nn.Linear(4, 4)
        self.within = within

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x)
        if not self.within:
            found.register_hook(lambda gradient: gradient * 2)
        return found


@pytest.mark.parametrize("source", [*SOURCES, pytest.param("opened", marks=needs_export), "recorded"])
def test_hooks_on_values_are_refused(source: str) -> None:
    """A graph would not have them."""
    with pytest.raises(ProfileError, match="cannot"):
        trace(Hooked(within=False), (torch.ones(2, 4),), sources=[source])


class Inferring(nn.Linear):
    """Needs no gradient."""

    @torch.inference_mode()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


@pytest.mark.parametrize("source", [*SOURCES, pytest.param("opened", marks=needs_export), "recorded"])
def test_inference_mode_is_refused(source: str) -> None:
    """A graph would train what it runs."""
    with pytest.raises(ProfileError, match="cannot"):
        trace(Inferring(4, 4), (torch.ones(2, 4),), sources=[source])


@needs_export
def test_what_runs_in_inference_mode_may_stay_whole() -> None:
    model, x = nn.Sequential(Inferring(4, 4), nn.Tanh()), torch.ones(2, 4)
    traced = trace(model, (x,))
    assert traced.level == "module"
    assert not graph_of(traced)(x).requires_grad


@needs_export
def test_what_has_a_hook_on_a_value_may_stay_whole() -> None:
    model, x = Hooked(within=True), torch.ones(2, 4)
    traced = trace(model, (x,))
    model(x).sum().backward()
    expected = model.layer.layer.weight.grad
    model.zero_grad(set_to_none=True)
    graph_of(traced)(*traced.arguments((x,))).sum().backward()
    assert expected is not None
    assert torch.equal(model.layer.layer.weight.grad, expected)


@pytest.mark.parametrize("source", SOURCES)
def test_gradients_are_those_of_the_model(source: str) -> None:
    torch.manual_seed(0)
    model = Convolutions()
    images = torch.randn(2, 3, 6, 6)
    graph_module = graph_of(trace(model, (images,), sources=[source]))
    model(images).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    graph_module(images).backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, expected[name]), name


@pytest.mark.parametrize("source", SOURCES)
def test_nodes_know_their_modules(source: str) -> None:
    graph = graph_of(trace(TiedLM(), (IDS,), sources=[source])).graph
    paths = [module_of(node) for node in graph.nodes if node.op.startswith("call")]
    assert {"embed", "mix.0", "mix.1", "head", ""} <= set(paths)
    assert paths.index("embed") < paths.index("mix.0") < paths.index("head")


@pytest.mark.parametrize("source", SOURCES)
def test_two_arguments_that_are_one_tensor_stay_two(source: str) -> None:
    class Difference(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a - 2 * b

    x, y = torch.ones(3), torch.full((3,), 5.0)
    graph_module = graph_of(trace(Difference(), (x, x), sources=[source]))
    assert torch.equal(graph_module(x, y), x - 2 * y)


@pytest.mark.parametrize("source", SOURCES)
def test_tensors_that_the_model_makes_are_new_in_each_run(source: str) -> None:
    graph_module = graph_of(trace(Fresh(), (torch.ones(2, 4),), sources=[source]))
    first = graph_module(torch.ones(2, 4)).clone()
    assert torch.equal(graph_module(torch.ones(2, 4)), first)


@needs_export
def test_a_model_on_another_device_than_the_sample_is_traced_op_by_op() -> None:
    model = TiedLM().to("meta")
    found = trace(model, (IDS,), sources=["export"])
    assert found.level == "operator"
    assert all(tensor.is_meta for tensor in found.sample.tensors)


def test_a_symbol_is_a_tensor_to_the_model() -> None:
    x = torch.ones(2, 4)
    graph_module = graph_of(trace(Asking(), (x,), sources=["symbolic"]))
    assert torch.equal(graph_module(x), Asking()(x))
    assert isinstance(x, torch.Tensor)
    assert isinstance.__module__ == "builtins"


@pytest.mark.parametrize("source", SOURCES)
def test_tensors_in_lists_and_dicts_are_arguments(source: str) -> None:
    a, b, c = torch.ones(3), torch.full((3,), 2.0), torch.full((3,), 3.0)
    args = ([a, b], {"weight": 2.0, "bias": c})
    traced = trace(Nested(), args, sources=[source])
    assert traced.sample.names == ("pair_0", "pair_1", "extra_0")
    found = graph_of(traced)(*traced.arguments(([b, a], {"weight": 2.0, "bias": a})))
    expected = Nested()([b, a], {"weight": 2.0, "bias": a})
    assert torch.equal(found["total"], expected["total"])
    assert torch.equal(found["parts"][1][0], expected["parts"][1][0])
    assert found["name"] == "nested"


@needs_export
def test_a_part_without_gradient_stays_without() -> None:
    model = Quiet()
    x = torch.ones(2, 4, requires_grad=True)
    traced = trace(model, (x,))
    assert traced.level == "operator"
    model(x).sum().backward()
    expected, x.grad = x.grad, None
    graph_of(traced)(x).sum().backward()
    assert torch.equal(x.grad, expected)


class Named(nn.Module):
    """A layer of any name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.get_submodule(self.name)(x)
        return found


@pytest.mark.parametrize("name", ["class", "None", "code", "graph", "meta", "_graph", "recompile", "shape_env"])
def test_names_that_no_graph_can_have_are_told(name: str) -> None:
    if hasattr(nn.Module(), name) or not (hasattr(fx.GraphModule({}, fx.Graph()), name) or keyword.iskeyword(name)):
        pytest.skip("this PyTorch has no such attribute")
    traced = trace(Named(name), (torch.ones(2, 4),))
    assert traced.level == "runtime"
    assert any(f"expected names that a graph can have, found '{name}" in note for note in traced.notes)


def test_a_module_with_such_a_name_stays_whole() -> None:
    model, x = nn.Sequential(nn.Tanh(), Named("class")), torch.ones(2, 4)
    traced = trace(model, (x,))
    assert traced.level == "module"
    assert torch.equal(graph_of(traced)(x), model(x))


def test_other_odd_names_are_as_all_others() -> None:
    model, x = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("1x", "a b", "a-b", "_x", "self")}), torch.ones(2, 4)
    model.forward = lambda x: sum(layer(x) for layer in model.values())  # type: ignore[method-assign]
    traced = trace(model, (x,), sources=["symbolic"])
    assert torch.equal(graph_of(traced)(x), model(x))


def test_failing_children_stay_whole_and_are_named() -> None:
    model = OneBranching()
    traced = trace(model, (torch.ones(2, 4),))
    assert traced.level == "opened"
    assert any("Branching" in note and line_of_the_branch() in note for note in traced.notes)
    targets = {str(node.target) for node in graph_of(traced).graph.nodes if node.op == "call_module"}
    assert targets == {"first", "parts.0.0", "parts.0.1", "parts.1"}
    for sign in (1.0, -1.0):
        x = torch.full((2, 4), sign)
        assert torch.equal(graph_of(traced)(x), model(x))


def test_whole_children_only_are_the_module_level() -> None:
    model = nn.Sequential(Branching(), nn.Sequential(Branching()))
    traced = trace(model, (torch.ones(2, 4),))
    assert traced.level == "module"
    assert torch.equal(graph_of(traced)(-torch.ones(2, 4)), model(-torch.ones(2, 4)))


def test_what_has_no_graph_is_observed_while_it_runs() -> None:
    traced = trace(Branching(), (torch.ones(2, 4),), sources=["symbolic", "opened", "runtime"])
    assert traced.level == "runtime"
    assert traced.graph_module is None
    assert [name for name in traced.ops if name in ("x", "linear", "relu", "output")] == [
        "x",
        "linear",
        "relu",
        "output",
    ]
    assert any(line_of_the_branch() in note for note in traced.notes)


def test_without_fallback_the_error_names_the_line() -> None:
    with pytest.raises(ProfileError, match=re.escape(line_of_the_branch())):
        trace(Branching(), (torch.ones(2, 4),), sources=["symbolic", "export"])


def test_tracing_leaves_the_model_alone() -> None:
    model = Convolutions()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    for source in ("symbolic", "opened", "runtime", *(["export", "recorded"] if has_export() else [])):
        trace(model, (torch.ones(2, 3, 6, 6),), sources=[source])
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((), {}, "ids_BT"),
        ((IDS,), {"colour": 1}, "colour"),
        ((3,), {}, "with a tensor among them"),
    ],
)
def test_wrong_arguments_are_told(args: tuple[Any, ...], kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(ProfileError, match=words):
        trace(TiedLM(), args, kwargs)


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [((IDS, 3.0), {}, "2.0, a constant"), ((IDS,), {}, "structure"), ((IDS, 2.0), {"mixed": True}, "structure")],
)
def test_graph_refuses_other_constants(args: tuple[Any, ...], kwargs: dict[str, Any], words: str) -> None:
    traced = trace(TiedLM(), (IDS, 2.0))
    with pytest.raises(ProfileError, match=words):
        traced.arguments(args, kwargs)


def test_shapes_that_do_not_match_name_the_line() -> None:
    lines, start = inspect.getsourcelines(OneBranching.forward)
    line = start + next(index for index, text in enumerate(lines) if "self.first" in text)
    with pytest.raises(ProfileError, match=rf"float32\[2, 5\].*{re.escape(str(Path(__file__).parent))}.*:{line}:"):
        trace(OneBranching(), (torch.ones(2, 5),), sources=["runtime"])


@pytest.mark.parametrize("what", [len, lambda x: x])
def test_functions_are_refused(what: Any) -> None:
    with pytest.raises(ProfileError, match=r"nn\.Module"):
        trace(what, (torch.ones(1),))


def test_unknown_sources_are_refused() -> None:
    with pytest.raises(ProfileError, match="magic"):
        trace(TiedLM(), (IDS,), sources=["magic"])


@needs_export
def test_a_parametrized_weight_keeps_its_parameters_names() -> None:
    class Double(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2

    model = nn.Sequential(nn.Linear(4, 4))
    parametrize.register_parametrization(model[0], "weight", Double())
    graph_module = graph_of(trace(model, (torch.ones(2, 4),), sources=["export"]))
    assert set(dict(graph_module.named_parameters())) == set(dict(model.named_parameters()))
    assert torch.equal(graph_module(torch.ones(2, 4)), model(torch.ones(2, 4)))


def test_interpreter_of_the_rfc_times_nodes_and_counts_bytes() -> None:
    interpreter = ProfilingInterpreter(TiedLM())
    found = interpreter.run(IDS, 2.0)
    assert found["logits"].shape == (2, 3, 10)
    assert interpreter.activation_sizes["mix_1" if "mix_1" in interpreter.activation_sizes else "relu"] == 2 * 3 * 4 * 4
    assert max(interpreter.parameter_sizes.values()) == 10 * 4 * 4
    costs = interpreter.get_costs()
    assert list(costs)[-1] == "head"
    assert sum(costs.values()) == pytest.approx(sum(interpreter.execution_times_sec.values()))


def test_a_trace_leaves_what_is_frozen_in_evaluation() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).eval())
    found = trace(model, (torch.ones(3, 2),)).graph_module
    assert found is not None
    assert model.training
    assert not model[1].training
    assert not found.get_submodule("1").training
