"""Two parameters in the same memory train as one in the model, and would not in stages on devices of their own."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

from torch_lms.errors import PartitionError
from torch_lms.stages.cutting import split
from torch_lms.stages.overlaps import check_memory
from torch_lms.stages.stage import Stage

WHOLE = torch.arange(32.0).view(4, 8)


class Pair(nn.Module):
    """Two parameters, or a parameter and a buffer; the first is read in stage 0, the other in stage 1."""

    def __init__(self, one: torch.Tensor, other: torch.Tensor) -> None:
        super().__init__()
        self.one = one
        if isinstance(other, nn.Parameter):
            self.other = other
        else:
            self.register_buffer("other", other)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.one.sum()).relu() * self.other.sum()


class BufferTracer(fx.Tracer):
    proxy_buffer_attributes = True


def cut(model: nn.Module, *, together: bool = False) -> list[Stage]:
    graph = BufferTracer().trace(model)
    names = [node.name for node in graph.nodes if node.op.startswith("call_")]
    border = names.index("relu")
    stage_of = {name: int(place > border and not together) for place, name in enumerate(names)}
    return split(fx.GraphModule(model, graph), stage_of, model=model)


def trained(value: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(value)


def frozen(value: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


SAME_MEMORY: list[Callable[[], Pair]] = [
    lambda: Pair(trained(WHOLE), trained(WHOLE)),
    lambda: Pair(trained(WHOLE), trained(WHOLE.t())),
    lambda: Pair(trained(WHOLE), trained(WHOLE[2:3, 3:5])),
    lambda: Pair(trained(WHOLE[:, :3]), trained(WHOLE[:, 2:])),
    lambda: Pair(trained(WHOLE[:, ::2]), trained(WHOLE[:, 2:3])),
    lambda: Pair(trained(torch.view_as_complex(WHOLE.view(4, 4, 2))), trained(WHOLE[:, 1::2])),
    lambda: Pair(trained(WHOLE), frozen(WHOLE)),
    lambda: Pair(frozen(WHOLE), trained(WHOLE)),
    lambda: Pair(trained(WHOLE), WHOLE[0]),
]


@pytest.mark.parametrize("make", SAME_MEMORY)
def test_two_tensors_in_the_same_memory_in_different_stages_are_refused(make: Callable[[], Pair]) -> None:
    with pytest.raises(PartitionError, match=r"two tensors in the same memory.*make them one parameter \(") as raised:
        cut(make())
    assert "'one' of stage 0" in str(raised.value)
    assert "'other' of stage 1" in str(raised.value)


@pytest.mark.parametrize("make", SAME_MEMORY)
def test_in_one_stage_they_may_be(make: Callable[[], Pair]) -> None:
    (stage,) = cut(make(), together=True)
    assert stage.one is not stage.other


@pytest.mark.parametrize(
    "make",
    [
        lambda: Pair(trained(WHOLE), trained(WHOLE.clone())),
        lambda: Pair(trained(WHOLE[:2]), trained(WHOLE[2:])),
        lambda: Pair(trained(WHOLE[:, :4]), trained(WHOLE[:, 4:])),
        lambda: Pair(trained(WHOLE[:, ::2]), trained(WHOLE[:, 1::2])),
        lambda: Pair(trained(torch.view_as_complex(WHOLE.view(4, 4, 2))[:, ::2]), trained(WHOLE[:, 2::4])),
        lambda: Pair(trained(WHOLE), trained(WHOLE[:, :0])),
        lambda: Pair(trained(torch.ones(0, 3)), trained(torch.ones(0, 3))),
        lambda: Pair(frozen(WHOLE), frozen(WHOLE)),
        lambda: Pair(frozen(WHOLE), WHOLE[0]),
        lambda: Pair(trained(WHOLE.to("meta")), trained(WHOLE.to("meta"))),
    ],
)
def test_what_is_apart_or_never_changes_is_cut(make: Callable[[], Pair]) -> None:
    assert [stage.shared for stage in cut(make())] == [{}, {}]


def test_one_parameter_under_two_names_is_cut() -> None:
    both = trained(WHOLE)
    assert all(stage.shared for stage in cut(Pair(both, both)))


def test_a_storage_of_many_parameters_is_looked_through_at_once() -> None:
    parts = torch.zeros(20_000).split(1)
    began = time.monotonic()
    check_memory(((place % 2, str(place)), trained(part)) for place, part in enumerate(parts))
    assert time.monotonic() - began < 10
