from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from torch_lms._torch_compat import has_export
from torch_lms.errors import PipelineError
from torch_lms.pipeline.borders import carrier_metas, describe, has_numbers, pack, unpack
from torch_lms.pipeline.boundary import Boundary, Microbatch, _Enter
from torch_lms.profile.tracing import trace
from torch_lms.stages.cutting import split

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "left right")

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    made = torch.randint(-100, 100, shape, generator=generator).to(dtype)
    if dtype == torch.int64 and made.numel():
        made = made * (1 << 40)  # bits that a float would lose
    if made.dim() > 1:
        made = made.permute(draw(st.permutations(range(made.dim()))))
    if made.dim() and made.shape[0] > 1 and draw(st.booleans()):
        made = made[::2]
    return made


numbers = st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False))
constants = st.sampled_from([None, "name", torch.float16])
values = st.recursive(
    st.one_of(tensors(), numbers, constants),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(Pair, inner, inner),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    ),
    max_leaves=8,
)


NO_HOST_VALUES: Any = None  # where nothing but tensors crosses


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_same(value, other[key])
    elif isinstance(one, (tuple, list)):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=False):
            assert_same(left, right)
    else:
        assert one == other


@given(values)
@settings(max_examples=200, deadline=None)
def test_any_value_crosses_unchanged_in_contiguous_floating_carriers(value: Any) -> None:
    template = describe(value)
    carriers, numbers = pack(template, value, CPU, "stage 0")
    assert carriers
    assert bool(numbers) == has_numbers(template)
    metas = carrier_metas(template)
    assert [(tuple(c.shape), c.dtype) for c in carriers] == [(shape, dtype) for shape, dtype, _ in metas]
    assert all(carrier.is_contiguous() and carrier.dtype.is_floating_point for carrier in carriers)
    assert_same(unpack(template, carriers, numbers, CPU), value)


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(24.0).view(2, 3, 4).transpose(0, 2),
        torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(24.0).view(4, 6)[:, :2],
        torch.arange(24.0).view(4, 6).chunk(3, 1)[1].transpose(0, 1),
    ],
)
def test_strides_are_the_same_behind_the_border(value: torch.Tensor) -> None:
    template = describe(value)
    crossed = unpack(template, *pack(template, value, CPU, "stage 0"), CPU)
    assert crossed.stride() == value.stride()
    assert torch.equal(crossed, value)


WAVES = torch.complex(torch.arange(24.0), torch.arange(24.0).flip(0) + 0.5).view(4, 6)


@pytest.mark.parametrize(
    "view",
    [
        WAVES.conj(),
        WAVES.conj().imag,
        WAVES.conj().t(),
        WAVES.conj()[:, :5],
        torch._neg_view(WAVES.conj()),
        torch._neg_view(torch.arange(6)),
        torch._neg_view(torch.arange(6, dtype=torch.int8)),
    ],
)
def test_a_conjugated_or_negated_view_crosses_as_the_values_that_it_stands_for(view: torch.Tensor) -> None:
    assert view.is_conj() or view.is_neg()
    template = describe(view)
    ((carrier,), _) = pack(template, view, CPU, "stage 0")
    assert carrier.is_contiguous()
    assert not carrier.is_conj()
    assert not carrier.is_neg()
    crossed = unpack(template, [carrier], [], CPU)
    assert torch.equal(crossed, view)
    assert (crossed.dtype, crossed.is_conj(), crossed.is_neg()) == (view.dtype, False, False)


def test_the_gradient_of_what_came_in_is_no_conjugated_view() -> None:
    carrier = torch.ones(3, dtype=torch.complex64, requires_grad=True)
    _, entered = _Enter.apply((True,), carrier)  # type: ignore[no-untyped-call]
    given: list[torch.Tensor] = []
    carrier.register_hook(given.append)
    weights = torch.complex(torch.arange(3.0), torch.ones(3))
    (entered.conj() * weights).real.sum().backward()
    (gradient,) = given
    assert torch.equal(gradient, weights)
    assert gradient.is_contiguous()
    assert not gradient.is_conj()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_a_dimension_of_one_element_has_the_stride_that_pytorch_expects(dtype: torch.dtype) -> None:
    value = torch.arange(32).to(dtype).as_strided((1, 1, 8, 4), (32, 4, 4, 1))
    ((carrier,), _) = pack(describe(value), value, CPU, "here")
    (meta,) = carrier_metas(describe(value))
    assert carrier.stride() == torch.empty(meta[0], device="meta").stride()
    assert torch.equal(unpack(describe(value), [carrier], [], CPU), value)


def test_a_device_becomes_that_of_the_stage() -> None:
    template = describe((torch.device("meta"), torch.ones(1)))
    packed = pack(template, (torch.device("meta"), torch.ones(1)), CPU, "stage 0")
    assert unpack(template, *packed, CPU)[0] == CPU


@pytest.mark.parametrize(
    ("first", "later"),
    [
        (torch.ones(2, 3), torch.ones(3, 2)),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        ("a", "b"),
        ((1, 2), (1, 2, 3)),
        ({"a": 1}, {"b": 1}),
        (1, 1.0),
        (torch.ones(1), None),
    ],
)
def test_what_is_not_as_in_the_first_step_is_refused(first: Any, later: Any) -> None:
    with pytest.raises(PipelineError, match="stage 7, as in the first step"):
        pack(describe(first), later, CPU, "stage 7")


class Counting(nn.Module):
    """Weighs what it makes by a buffer that each microbatch writes."""

    count: torch.Tensor

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(4, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = self.count.add_(1)
        loss: torch.Tensor = (self.last(self.first(x)) * count).mean()
        return loss


class BufferTracer(fx.Tracer):
    proxy_buffer_attributes = True


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_value_in_a_buffer_leaves_as_it_was_for_its_microbatch(dtype: torch.dtype) -> None:
    """It may be sent, or read by the next stage on the same rank, when the next microbatch has written the buffer."""
    model = Counting(dtype)
    graph = BufferTracer().trace(model)
    names = [node.name for node in graph.nodes if node.op.startswith("call_")]
    stage_of = {name: int(index >= names.index("last")) for index, name in enumerate(names)}
    stage = split(fx.GraphModule(model, graph), stage_of, model=model)[0]
    boundary = Boundary(stage, CPU, None, 2, host_values=NO_HOST_VALUES, carries_random=False)
    microbatches = [Microbatch({"x": torch.ones(2, 4)})] * 2
    boundary.prepare(None, [], microbatches[0])
    boundary.load(microbatches)
    counts = []
    made = [boundary() for _ in microbatches]
    for carriers in made:
        values = unpack(boundary.crossing.outgoing, carriers, [], CPU)
        counts += [value.tolist() for name, value in zip(stage.outputs, values, strict=True) if "add" in name]
    assert counts == [[1.0] * 4, [2.0] * 4]


class Halving(nn.Module):
    """Changes a parameter, and uses it behind the border."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.scale.data.mul_(0.5)
        loss: torch.Tensor = (self.last(self.first(x)) * scale).mean()
        return loss


class HalvingWithoutGradient(Halving):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = self.scale.mul_(0.5)
        loss: torch.Tensor = (self.last(self.first(x)) * scale).mean()
        return loss


@pytest.mark.parametrize("kind", [Halving, *([HalvingWithoutGradient] if has_export() else [])])
def test_a_value_in_a_parameter_that_is_changed_leaves_as_it_was_for_its_microbatch(kind: type[Halving]) -> None:
    """And finding what crosses the border, which runs the stage once, leaves the parameter as it was."""
    model = kind()
    traced = trace(model, (torch.ones(2, 4),))
    assert traced.graph_module is not None
    names = [node.name for node in traced.graph_module.graph.nodes if node.op.startswith("call_")]
    behind = next(name for name in names if name in ("last", "linear_1"))
    stage_of = {name: int(place >= names.index(behind)) for place, name in enumerate(names)}
    stage = split(traced, stage_of, model=model)[0]
    assert {"scale"} == stage.writes
    boundary = Boundary(stage, CPU, None, 2, host_values=NO_HOST_VALUES, carries_random=False)
    microbatches = [Microbatch({"x": torch.ones(2, 4)})] * 2
    boundary.prepare(None, [], microbatches[0])
    assert model.scale.tolist() == [1.0] * 4
    boundary.load(microbatches)
    made = [boundary() for _ in microbatches]
    crossed = [unpack(boundary.crossing.outgoing, carriers, [], CPU) for carriers in made]
    scales = [value.tolist() for values in crossed for value in values if value.shape == (4,)]
    assert scales == [[0.5] * 4, [0.25] * 4]


def test_a_value_in_a_parameter_that_no_forward_changes_is_not_copied() -> None:
    class Shared(Halving):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = self.scale.view(4)
            return (self.last(self.first(x)) * scale).mean()

    model = Shared()
    traced = trace(model, (torch.ones(2, 4),))
    assert traced.graph_module is not None
    names = [node.name for node in traced.graph_module.graph.nodes if node.op.startswith("call_")]
    stage = split(traced, {name: int(place >= 2) for place, name in enumerate(names)}, model=model)[0]
    boundary = Boundary(stage, CPU, None, 2, host_values=NO_HOST_VALUES, carries_random=False)
    microbatch = Microbatch({"x": torch.ones(2, 4)})
    boundary.prepare(None, [], microbatch)
    boundary.load([microbatch])
    assert model.scale.data_ptr() in [carrier.data_ptr() for carrier in boundary()]
