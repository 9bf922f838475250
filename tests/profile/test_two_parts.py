"""The two parts of a backward, timed node by node: what has two, and what has only one."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch
from torch import nn

from torch_lms.partition.costs import CostGraph
from torch_lms.profile import Profile, ProfileConfig, alone_figures, profile, profile_run
from torch_lms.profile.alone import Alone


class CountingClock:
    """Each mark comes 1 us after the one before it, so that all parts take equally long."""

    def __init__(self) -> None:
        self._marks = count()

    def mark(self) -> int:
        return next(self._marks)

    def lead(self) -> None:
        pass

    def elapsed_us(self, start: int, end: int) -> float:
        return float(end - start)

    def wait(self) -> None:
        pass


class Mixed(nn.Module):
    """A table, a layer, a weight that is transposed first, what works in place, and what has no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(7, 6), nn.Linear(6, 6)
        self.weight, self.frozen = nn.Parameter(torch.rand(5, 6)), nn.Linear(5, 5).requires_grad_(False)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.table(numbers)).relu_()
        x = torch.matmul(x, self.weight.t())
        return self.norm(self.frozen(x)).sum()


def parts_of(made: Profile) -> dict[str, tuple[float | None, float | None]]:
    """Of each node with a backward, by what it calls, as shares of the whole."""
    return {
        node.target.rpartition(".")[2]: (node.input_backward_us, node.weight_backward_us)
        for node in made.nodes
        if node.gradient_bytes and node.op not in ("get_attr", "placeholder")
    }


def profiled(sources: tuple[str, ...], **more: Any) -> Profile:
    config = ProfileConfig(warmup_runs=0, timed_runs=1, links=False, progress=False, sources=sources, **more)
    return profile(Mixed(), torch.arange(7).remainder(7), config=config)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_run, "make_clock", lambda device: CountingClock())


@pytest.mark.usefixtures("counting")
@pytest.mark.parametrize("accumulate", [False, True])
def test_each_node_has_the_parts_that_zero_bubble_makes_of_it(accumulate: bool) -> None:
    made = profiled(("symbolic",), two_parts=True, accumulate=accumulate)
    whole = {node.target.rpartition(".")[2]: node.backward_us for node in made.nodes}
    shares = {
        name: (inputs / whole[name], weights / whole[name])
        for name, (inputs, weights) in parts_of(made).items()
        if inputs is not None and weights is not None and whole[name]
    }
    assert shares["table"] == (0.0, 1.0)
    assert shares["layer"] == shares["matmul"] == shares["norm"] == (1.0, 1.0)  # of each mark one, as the whole has
    assert shares["relu_"] == shares["frozen"] == shares["sum"] == (1.0, 0.0)
    assert shares["t"] == (0.0, 1.0)  # made of a weight alone
    assert Profile.from_json(made.to_json()) == made


@pytest.mark.usefixtures("counting")
def test_the_model_is_left_as_it_was() -> None:
    model, numbers = Mixed(), torch.arange(7)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    profile(model, numbers, config=ProfileConfig(warmup_runs=0, timed_runs=1, two_parts=True, progress=False))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)


def test_without_being_asked_for_no_parts_are_timed() -> None:
    assert set(parts_of(profiled(("symbolic",))).values()) == {(None, None)}


def test_a_profile_in_pieces_says_that_it_has_none() -> None:
    made = profiled(("symbolic",), two_parts=True, pieces=True)
    assert any("two parts of backwards" in note for note in made.notes)
    graph = CostGraph.from_profile(made)
    assert all(node.input_backward_us is None for node in graph.nodes)


@pytest.mark.parametrize("repeats", [1, 3])
def test_nodes_that_do_the_same_are_timed_once(repeats: int, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[Alone] = []
    plain = alone_figures.part_shares
    monkeypatch.setattr(alone_figures, "part_shares", lambda *args: timed.append(args[-1]) or plain(*args))
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(repeats + 1)])
    x = torch.rand(3, 4, requires_grad=True)
    profile(model, x, config=ProfileConfig(warmup_runs=0, timed_runs=1, two_parts=True, progress=False, links=False))
    assert [bool(node.weights) for node in timed] == [True, False]
