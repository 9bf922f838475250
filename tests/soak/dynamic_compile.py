"""A function that is compiled for sizes that change leaves no pins: what it has used can be paged out again."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import nn

import torch_lms
from tests.soak.program import Given, finish, parse

LIMITS = {"cpu": "80MiB", "cuda": "160MiB"}
WIDTH = 512


def try_once(function: Callable[[torch.Tensor], torch.Tensor], model: nn.Module, rows: int, given: Given) -> list[str]:
    """A forward and a backward: as eager, and everything that took part goes out afterwards."""
    x = torch.randn(rows, WIDTH, device=given.device)
    results = []
    for module in (model, function):
        model.zero_grad()
        module(x).square().mean().backward()
        results.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    wrong = []
    if not all(torch.allclose(ours, eager) for eager, ours in zip(*results, strict=True)):
        wrong.append(f"{rows} rows: other gradients than eager's")
    used = [x, *model.parameters()]
    torch_lms.pageout(used)  # raises for what is pinned
    torch_lms.wait()
    states = [torch_lms.swap.state(tensor) for tensor in used]
    if states != ["paged_out"] * len(used):
        wrong.append(f"{rows} rows: expected all to be paged out, found {states}")
    return wrong


def fill(given: Given) -> None:
    """Three times as many bytes as the limit: raises if they cannot go."""
    kept = [torch.randn(4 << 20, device=given.device) for _ in range(12 if given.device == "cpu" else 24)]
    assert all(bool(tensor.isfinite().all()) for tensor in kept)


def main() -> None:
    given = parse(__doc__)
    choose = random.Random(given.seed)
    torch_lms.enable({given.device: LIMITS[given.device]}, min_bytes="64KiB")
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)).to(given.device)
    function = torch.compile(model, dynamic=True, backend="aot_eager")
    failures: list[str] = []
    rounds = 0
    while not failures and (rounds < 3 or not given.is_over()):
        try:
            failures += try_once(function, model, choose.randrange(500, 2500), given)
            fill(given)
        except RuntimeError as error:  # out of memory, a refused page-out
            failures.append(f"round {rounds}: {type(error).__name__}: {error}")
        rounds += 1
    finish(f"{rounds} rounds on {given.device}, {torch_lms.stats().pageout_bytes >> 20} MiB paged out", failures)


if __name__ == "__main__":
    main()
