"""Models of TorchScript, of parameters without sizes, and with outputs that are no plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from torch_lms._torch_compat import has_export
from torch_lms.errors import ProfileError
from torch_lms.profile import ProfileConfig, profile, trace

if has_export():
    from torch_lms.fitting import fit

QUICK = ProfileConfig(warmup_runs=0, timed_runs=1, links=False, progress=False)


class Sparse(nn.Linear):
    """Gives a sparse tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).to_sparse()


@pytest.mark.parametrize("sources", [ProfileConfig().sources, ("runtime",)])
def test_a_sparse_output_has_a_backward(sources: tuple[str, ...]) -> None:
    found = profile(Sparse(4, 4), torch.ones(2, 4), config=replace(QUICK, sources=sources))
    assert found.step_us > 0
    assert sum(node.backward_us for node in found.nodes) > 0


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: torch.jit.script(nn.Linear(4, 4)), "expected a module of Python code, found RecursiveScriptModule"),
        (lambda: torch.jit.trace(nn.Linear(4, 4), torch.ones(2, 4)), "expected a module of Python code"),
        (lambda: nn.Sequential(nn.LazyLinear(4)), r"'0\.weight' of Sequential without; call the model once"),
    ],
)
def test_models_that_cannot_be_are_told(build: Callable[[], nn.Module], message: str) -> None:
    ways: list[Callable[..., Any]] = [partial(profile, config=QUICK), lambda model, x: trace(model, (x,))]
    ways += [partial(fit, limit="1GiB")] if has_export() else []
    for way in ways:
        with pytest.raises(ProfileError, match=message):
            way(build(), torch.ones(2, 4))


def test_a_part_of_torchscript_stays_whole() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4))), torch.ones(2, 4)
    traced = trace(model, (x,))
    assert traced.graph_module is not None
    assert torch.equal(traced.graph_module(x), model(x))
