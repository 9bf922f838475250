"""What an optimizer's step takes: measured on copies of some parameters, for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.profile.test_two_parts import CountingClock
from torch_lms._torch_compat import has_dispatch_modes
from torch_lms.partition import CostGraph
from torch_lms.profile import ProfileConfig, optimizer_time, profile
from torch_lms.profile.optimizer_time import time_optimizer

QUICK = ProfileConfig(warmup_runs=0, timed_runs=1, progress=False, links=False)


def model_of() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4, bias=False), nn.Linear(4, 4).requires_grad_(False))
    model[0].weight.grad = torch.ones(8, 8)
    return model


def counted(steps: list[int]) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """Notes how many parameters each step has."""

    class Counted(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            steps.append(sum(len(group["params"]) for group in self.param_groups))
            return super().step(closure)

    return lambda parameters: Counted(parameters, lr=1.0)


def test_time_is_shared_by_bytes_and_the_parameters_stay_as_they_were() -> None:
    model = model_of()
    before = [parameter.clone() for parameter in model.parameters()]
    steps: list[int] = []
    found = time_optimizer(model, counted(steps), CountingClock())
    each_us = 1 / 5  # the clock goes on by 1 us for five steps
    total_bytes = 4 * (64 + 8 + 32)
    assert found == pytest.approx({
        name: each_us * size / total_bytes for name, size in (("0.weight", 256), ("0.bias", 32), ("1.weight", 128))
    })  # fmt: skip
    assert set(steps) == {3}
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))
    assert bool((model[0].weight.grad == 1).all())


def test_each_group_is_timed_by_itself_and_only_a_few_parameters_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_time, "_BATCH_BYTES", 256)
    monkeypatch.setattr(optimizer_time, "_BATCHES", 2)
    model = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(6))
    optimizer = torch.optim.Adam([{"params": list(model[:5].parameters()), "lr": 1.0}, {"params": model[5].weight}])
    timed: list[int] = []
    plain = optimizer_time._time_step
    monkeypatch.setattr(
        optimizer_time, "_time_step", lambda batch, clock: timed.append(len(batch)) or plain(batch, clock)
    )
    found = time_optimizer(model, optimizer, CountingClock())
    assert timed == [1, 1, 1]
    assert found == pytest.approx({f"{index}.weight": 1 / 5 for index in range(6)})
    assert not optimizer.state


def test_a_profile_tells_it_and_a_partition_takes_it() -> None:
    model = model_of()
    assert profile(model, torch.ones(2, 8), config=QUICK).optimizer_us is None
    found = profile(model, torch.ones(2, 8), optimizer=torch.optim.AdamW, config=QUICK)
    assert found.optimizer_us is not None
    assert found.optimizer_us.keys() == {"0.weight", "0.bias", "1.weight"}
    assert all(time_us > 0 for time_us in found.optimizer_us.values())
    assert CostGraph.from_profile(found).optimizer_us == found.optimizer_us


@pytest.mark.skipif(not has_dispatch_modes(), reason="PyTorch 1.12 has no storages on the meta device")
def test_on_the_meta_device_nothing_is_timed() -> None:
    found = profile(model_of().to("meta"), torch.ones(2, 8), optimizer=torch.optim.SGD, config=QUICK)
    assert found.optimizer_us is None
