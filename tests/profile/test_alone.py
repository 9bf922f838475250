"""Nodes that run alone: whatever a model runs with they run with too, and what working space they are said to need."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from torch_lms._torch_compat import has_dispatch_modes
from torch_lms.profile import NodeProfile, Profile, ProfileConfig, profile
from torch_lms.profile.storages import ones_for

QUICK = ProfileConfig(warmup_runs=0, timed_runs=1, progress=False)
ROWS, WIDTH = 3, 4
VALUE = 4 * ROWS * WIDTH
MANY = 300_000  # a square of so many elements fits in no memory

measured = pytest.mark.skipif(not has_dispatch_modes(), reason="no mode sees all ops")


class Named(dict):  # type: ignore[type-arg]
    """Has its items as attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class GivesNamed(nn.Module):
    def forward(self, x: torch.Tensor) -> Named:
        return Named(double=2 * x, more=x + 1)


class GivesList(nn.Module):
    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [2 * x, x + 1]


class TakesLast(nn.Module):
    def forward(self, values: list[torch.Tensor]) -> torch.Tensor:
        values.append(3 * values[0])
        return values.pop()


for kind in (GivesNamed, GivesList, TakesLast):
    kind.__module__ = "torch.nn.own"  # a trace does not look inside


class Linear(nn.Module):
    """A layer, and what a test does with its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


class NamedTuple(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).max(dim=1).values.sum()


class Attributes(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.own = GivesNamed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.own(self.linear(x))
        return (found.double * found.more).sum()


class ChangedList(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.last = GivesList(), TakesLast()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.own(self.linear(x))).sum()


class FarExpanded(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) + x[0, 0].expand(MANY, MANY)[0, :WIDTH]).sum()


class Sparse(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.sum(self.linear(x).to_sparse())


class WithoutDerivative(Linear):
    """No backward of its second result is run, for there is none."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.linear(x)
        return {"loss": y.sum(), "zeta": torch.special.zeta(y + 9, x)}


class InPlace(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5, inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.linear(x)).sum()


class Written(Linear):
    """What has no gradient is written to by what has: a layer's output, and a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.zeros(ROWS + 1, WIDTH)
        rows[1:] = self.linear(x)
        rows[0] = self.row
        return rows.exp().sum()


def profile_of(model: nn.Module, **more: Any) -> Profile:
    return profile(model, torch.rand(ROWS, WIDTH), config=QUICK, **more)


def node_of(found: Profile, name: str) -> NodeProfile:
    return next(node for node in found.nodes if name in node.name)


@pytest.mark.parametrize("kind", [NamedTuple, Attributes, ChangedList, FarExpanded, Sparse, WithoutDerivative])
def test_a_model_that_runs_is_profiled_from_its_graph(kind: type[nn.Module]) -> None:
    assert profile_of(kind()).level == "operator"


class _Picky(torch.autograd.Function):
    """Wants no gradient of its second output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        assert not second.any()
        return first * 2


class Picks(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return _Picky.apply(x)


Picks.__module__ = "torch.nn.own"


class FirstOfTwo(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.own = Picks()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(self.linear(x))[0].sum()


@measured
@pytest.mark.parametrize(("kind", "name", "made"), [(WithoutDerivative, "zeta", 1), (FirstOfTwo, "own", 2)])
def test_of_what_has_no_backward_by_itself_the_forward_alone_is_known(
    kind: type[nn.Module], name: str, made: int
) -> None:
    found = profile(kind(), torch.rand(ROWS, WIDTH), config=replace(QUICK, two_parts=True))
    node = node_of(found, name)
    assert node.input_backward_us is None
    assert node_of(found, "linear").input_backward_us is not None
    assert (node.forward_working_bytes, node.backward_working_bytes) == (made * VALUE, None)
    assert sum("does not run by itself" in note and name in note for note in found.notes) == 1


@measured
def test_what_a_node_in_place_keeps_is_no_working_space() -> None:
    """Its output is no new storage; the mask, which it keeps, is all that it makes."""
    assert node_of(profile_of(InPlace()), "drop").forward_working_bytes == 0


def test_a_gradient_of_what_is_expanded_is_no_larger_than_it() -> None:
    expanded = torch.zeros(()).expand(MANY, MANY)
    assert ones_for(expanded).shape == expanded.shape


@measured
def test_what_is_written_to_has_a_gradient_from_there_on() -> None:
    """In the backward of `exp` there are its gradient and its input's; in that of a write, with and without the row."""
    found = profile_of(Written())
    whole = VALUE + 4 * WIDTH
    assert node_of(found, "exp").backward_working_bytes == 2 * whole
    writes = [node.backward_working_bytes for node in found.nodes if "setitem" in node.name]
    assert len(writes) == 2
    assert all(nbytes is not None and nbytes >= 2 * whole for nbytes in writes)
