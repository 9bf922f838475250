"""Training with parameters, gradients and optimizer state on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.unit.paging_states import STATES, Place, snapshot
from tests.unit.test_autograd import everything_of, model

OPTIMIZERS: dict[str, Callable[[Any, bool], torch.optim.Optimizer]] = {
    "sgd": lambda parameters, foreach: torch.optim.SGD(parameters, 0.1, momentum=0.9, foreach=foreach),
    "adam": lambda parameters, foreach: torch.optim.Adam(parameters, 0.01, amsgrad=True, foreach=foreach),
    "adamw": lambda parameters, foreach: torch.optim.AdamW(parameters, 0.01, foreach=foreach),
    "rmsprop": lambda parameters, foreach: torch.optim.RMSprop(parameters, 0.01, foreach=foreach),
    "adagrad": lambda parameters, foreach: torch.optim.Adagrad(parameters, 0.01, foreach=foreach),
}


def _state_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]


def trained(make: Callable[[Any], torch.optim.Optimizer], place: Place) -> Any:
    module, losses = model(), []
    optimizer = make(module.parameters())
    for step in range(4):
        place([*everything_of(module), *_state_of(optimizer)])
        loss = module(torch.randn(5, 6)).square().mean()
        loss.backward()
        place([*everything_of(module), *_state_of(optimizer)])
        if step % 2:  # gradients of two batches
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 1)
        losses.append(loss)
    return losses, everything_of(module), _state_of(optimizer), _reloaded(optimizer, module, make)


def _reloaded(optimizer: torch.optim.Optimizer, module: torch.nn.Module, make: Any) -> Sequence[torch.Tensor]:
    other = make(module.parameters())
    other.load_state_dict(optimizer.state_dict())
    return _state_of(other)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_with_state_on_the_host_is_bit_equal(name: str, foreach: bool, state: str, paged: ModuleType) -> None:
    def run(place: Place) -> Any:
        torch.manual_seed(1)
        return snapshot(trained(lambda parameters: OPTIMIZERS[name](parameters, foreach), place))

    assert run(STATES[state]) == run(STATES["plain"])
