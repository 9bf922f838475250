"""Models of units that are connected at random, for ranks: what a unit's backward waits for is any of its inputs."""

from __future__ import annotations

import random
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.chunk import spread, spread_uses

WIDTH = spread_uses.WIDTH
SEEDS = range(24)


class Mix(nn.Module):
    """A unit of several inputs, which may use some parameters apart from them, and return one as it was given."""

    def __init__(self, inputs: int, rng: random.Random) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(inputs))
        self.table = nn.Embedding(4, WIDTH)
        self.use_table, self.add_first = rng.random() < 0.5, rng.random() < 0.5
        self.second = rng.choice(["given", "view", "made"])

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.zeros_like(inputs[0])
        if self.use_table:
            y = y + self.table(torch.arange(4, device=y.device))
        for layer, x in zip(self.layers, inputs, strict=True):
            y = y + torch.tanh(layer(x))
        if self.add_first:
            y = y + inputs[0]
        return y, {"given": inputs[-1], "view": inputs[0].view_as(y), "made": y * 0.5}[self.second]


class Connected(nn.Module):
    """Units in some order, of which one may run twice; each is called with what any before it have made."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        inputs = [rng.randint(1, 3) for _ in range(rng.randint(3, 8))]
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Mix(count, rng) for count in inputs)
        self.last = nn.Linear(WIDTH, WIDTH)
        order = rng.sample(range(len(inputs)), len(inputs)) if rng.random() < 0.3 else list(range(len(inputs)))
        order += [rng.choice(order)] if rng.random() < 0.4 else []
        self.calls = [
            (block, [rng.randrange(1 + 2 * place) for _ in range(inputs[block])], rng.choice([None, True, False]))
            for place, block in enumerate(order)
        ]
        self.results = [2 * len(order) - 1, rng.randrange(2 * len(order))]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [self.first(x)]
        for block, places, reentrant in self.calls:
            unit, given = self.blocks[block], [values[place] for place in places]
            values += unit(*given) if reentrant is None else checkpoint(unit, *given, use_reentrant=reentrant)
        one, other = (values[place] for place in self.results)
        return self.last(one + other)


def connected(rank: int, world: int) -> None:
    for seed in SEEDS:
        rng = random.Random(seed)
        backward = rng.choice([spread.once, spread.accumulated, spread.retained, spread_uses.both])
        options = {"chunk_numel": rng.choice([1 << 12, 1 << 13, 1 << 14]), "reuse_gradients": rng.random() < 0.7}
        print("seed", seed, backward.__name__, options, flush=True)
        spread.expect_equal(partial(Connected, seed), spread_uses.tiny_batch, rank, world, backward=backward, **options)
