"""Embeddings that keep their rows below a norm: a look-up writes to the weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from torch_lms._torch_compat import has_export
from torch_lms.profile.constraints import find_constraints, find_writes, written_attributes
from torch_lms.profile.tracing import trace

IDS = torch.tensor([1, 2, 3])


class Tied(nn.Module):
    """The last layer has the weight of the first."""

    def __init__(self, max_norm: float | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4, max_norm=max_norm)
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.layer(self.embed(ids)))
        return found


class Functional(Tied):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = functional.embedding(ids, self.embed.weight, max_norm=self.embed.max_norm)
        return functional.linear(self.layer(x), self.head.weight)


class Bag(Tied):
    """The first layer gives the mean of rows."""

    def __init__(self, max_norm: float | None) -> None:
        super().__init__(max_norm)
        self.embed = nn.EmbeddingBag(5, 4, max_norm=max_norm)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids[None])


SOURCES = ["symbolic", *(pytest.param(one, marks=pytest.mark.skipif(not has_export(), reason="no torch.export"))
                         for one in ("export", "recorded"))]  # fmt: skip


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", [Tied, Functional, Bag])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_all_that_reads_the_weight_is_in_one_stage(max_norm: float | None, kind: type[Tied], source: str) -> None:
    graph_module: Any = trace(kind(max_norm), (IDS,), sources=[source]).graph_module
    graph, modules = graph_module.graph, dict(graph_module.named_modules(remove_duplicate=False))
    head = [node for node in graph.nodes if node.op.startswith("call")][-1]
    writers = written_attributes(graph, modules)
    assert set().union(*writers.values()) == ({"embed.weight"} if max_norm else set())
    assert bool(find_writes(graph, modules)) == bool(max_norm)
    pairs = {(one.first, one.then) for one in find_constraints(graph, modules)}
    assert {(head, one) for one in writers} <= pairs
