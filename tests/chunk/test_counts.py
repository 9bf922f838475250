"""What an optimizer counts in something of its own, it counts as without chunks: once for each step."""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.chunk.plain import Chunked, Plain, same, train
from tests.chunk.small_model import batch, chunked, make, step
from torch_lms.chunk.values import Copies, take_over


@dataclass
class Counts:
    steps: int = 0
    last: list[int] = field(default_factory=list)


class Counting(torch.optim.Optimizer):
    """Counts steps in containers, and learns by all counts; keeps slow weights by parameter in a dict of its own."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "counted": {"steps": 0}})
        self.inside: dict[str, Any] = {"of": [{"it": 0}], "tensor": torch.zeros(())}
        self.recent: deque[int] = deque(maxlen=2)
        self.seen: set[int] = set()
        self.counts, self.space, self.tally = Counts(), SimpleNamespace(steps=0), Counter[str]()
        self.slow: dict[torch.Tensor, torch.Tensor] = {}
        self.lock, self.groups = threading.Lock(), self.param_groups

    @property
    def steps(self) -> list[float]:
        return [
            *(self.inside["of"][0]["it"], float(self.inside["tensor"]), self.recent[-1], len(self.seen)),
            *(self.counts.steps, len(self.counts.last), self.space.steps, self.tally["steps"]),
            self.param_groups[0]["counted"]["steps"],
        ]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        now = self.inside["of"][0]["it"] = self.inside["of"][0]["it"] + 1
        self.inside["tensor"] += 1
        self.recent.append(now)
        self.seen.add(now)
        self.counts.steps += 1
        self.counts.last.append(now)
        self.space.steps += 1
        self.tally["steps"] += 1
        self.inside.pop("first", None)
        for group in self.param_groups:
            group["counted"]["steps"] += 1
            for one in group["params"]:
                slow = self.slow.setdefault(one, one.clone())
                one.sub_(one.grad, alpha=group["lr"] / sum(self.steps))
                if now % 2 == 0:
                    one.copy_(slow.lerp_(one, 0.5))


@pytest.mark.parametrize("options", [{}, {"update_on": "host"}, {"step_in_backward": True}], ids=str)
def test_what_is_counted_in_containers_is_counted_once(options: dict[str, Any]) -> None:
    plain, chunked = Plain(make(), Counting), Chunked(make(), Counting, chunk_numel=4096, **options)
    assert chunked.optimizer.data.layout.chunks > 1
    for number, (expected, found) in enumerate(zip(train(plain, batch, 4), train(chunked, batch, 4), strict=True)):
        assert same([expected[0], *expected[-6:]], [found[0], *found[-6:]]), number
    assert chunked.optimizer._inner.steps == plain.optimizer.steps == [4] * 9  # type: ignore[attr-defined]
    assert list(chunked.optimizer._inner.recent) == [3, 4]  # type: ignore[attr-defined]


def test_what_the_program_sets_meanwhile_stays() -> None:
    model, optimizer = chunked(make(), Counting, chunk_numel=4096)
    optimizer._inner.inside["of the program"] = 1
    optimizer.param_groups[0]["counted"]["of the program"] = 1
    step(model, optimizer)
    assert optimizer._inner.inside["of the program"] == optimizer.param_groups[0]["counted"]["of the program"] == 1
    assert optimizer.param_groups[0]["params"][0] is model[0].weight


def test_copies_share_what_is_shared_and_changes_go_back_to_where_they_were() -> None:
    shared, parameter, lock = [1], torch.nn.Parameter(torch.ones(2)), threading.Lock()
    pair = (shared, 2)
    given: dict[str, Any] = {"a": shared, "b": {"a": shared}, "pair": pair, "same": (1, 2), "kept": [parameter, lock]}
    given["itself"] = given
    copies = Copies()
    made = copies.of(given)
    assert made["a"] is made["b"]["a"] is made["pair"][0] is not shared
    assert made["itself"] is made
    assert made["same"] is given["same"]
    assert made["kept"][0] is parameter
    assert made["kept"][1] is lock
    assert not list(copies.changes())
    made["a"] += [2, 3]
    made["b"]["new"] = made["a"]
    del made["pair"]
    made["kept"].pop()
    assert shared == [1]
    take_over(copies.changes())
    assert shared == [1, 2, 3]
    assert given["b"]["new"] is given["b"]["a"] is shared
    assert "pair" not in given
    assert given["kept"] == [parameter]


def test_tensors_stay_the_programs_and_may_change_places() -> None:
    one, other, unread = torch.zeros(()), torch.ones(()), torch.zeros(())
    given = {"one": one, "other": other, "unread": unread}
    copies = Copies()
    made = copies.of(given)
    made["one"], made["other"] = made["other"], made["one"]
    made["one"] += 1
    take_over(copies.changes())
    assert given["one"] is other
    assert given["other"] is one
    assert given["unread"] is unread
    assert (one, other) == (0, 2)
