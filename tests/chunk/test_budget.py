"""What a model's data takes is known before, and refused where there is no room."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_lms
from tests.chunk.plain import Chunked, Optimize
from tests.chunk.test_chunked import ADAMW, OPTIMIZERS, Owner, in_order, make
from tests.unit.trainings import GPT_TRAINING, RESNET_TRAINING, Training, one_thread
from torch_lms._core import core
from torch_lms.chunk.budget import budget_of, check_budget, needed_bytes
from torch_lms.chunk.ranks import ALONE
from torch_lms.chunk.trials import state_bytes_each, treats_each_element_alone
from torch_lms.errors import ChunkError

CPU = torch.device("cpu")


@one_thread()
@pytest.mark.parametrize("training", [GPT_TRAINING, RESNET_TRAINING], ids=lambda one: one.name)
@pytest.mark.parametrize("optimizer", ["AdamW", "foreach Adam", "SGD", "SGD with momentum", "RMSprop"])
def test_the_bytes_that_are_expected_are_those_that_come(training: Training, optimizer: str) -> None:
    chunked = Chunked(make(training), OPTIMIZERS[optimizer])
    data = chunked.optimizer.data
    expected = needed_bytes(data.tensors, data.layout, ALONE, chunked.optimizer._inner, CPU)
    for one in chunked.parameters:
        one.grad = torch.zeros_like(one)
    chunked.step()
    found = data.allocated_bytes()
    assert expected["parameters"] == found.pop("parameters")
    assert expected["masters"] == found.pop("masters")
    assert expected["optimizer state"] == sum(found.values())


def test_no_room_is_refused_before_anything_changes() -> None:
    model = Owner(in_order)
    before = [one.clone() for one in model.parameters()]
    with pytest.raises(ChunkError, match=r"expected room for the model's data, .* \(parameters .*, masters .*, optim"):
        torch_lms.chunked(model, ADAMW(model.parameters()), device_limit="4MiB", host_limit="4MiB")
    assert not torch_lms.swap.is_enabled()
    assert all(map(torch.equal, model.parameters(), before))
    torch_lms.chunked(model, ADAMW(model.parameters()))


NEEDED = {"parameters": 2 << 30, "masters": 4 << 30, "optimizer state": 8 << 30}


@pytest.mark.parametrize(
    ("device_limit", "host_limit", "update_on", "error"),
    [
        ("1GiB", "2GiB", "device", "expected room for the model's data, 14.00 GiB"),
        ("1TiB", "2GiB", "host", "expected room on the host for 12.00 GiB"),
        ("1GiB", "1000TiB", "device", "expected host_limit within the host's memory"),
    ],
)
def test_limits_of_a_gpu_are_compared_with_what_is_needed(
    device_limit: str, host_limit: str, update_on: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_lms.chunk.budget.core.total_bytes", lambda _: 64 << 30)
    device = torch.device("cuda", 0)

    def check(device_limit: str, host_limit: str | None, update_on: str) -> None:
        check_budget(NEEDED, device, budget_of(device, device_limit, host_limit), update_on=update_on)

    with pytest.raises(ChunkError, match=error):
        check(device_limit, host_limit, update_on)
    check("16GiB", None, "host")
    check("16GiB", None, "auto")


CPU_BYTES, GPU_BYTES, ALL_BYTES = 3 << 30, 5 << 30, 64 << 30


@pytest.mark.parametrize(("device", "expected"), [("cpu", CPU_BYTES), ("cuda:0", GPU_BYTES), ("cuda:1", ALL_BYTES)])
def test_the_limit_that_holds_is_that_of_the_models_device(
    device: str, expected: int, paged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    paged.enable({"cpu": CPU_BYTES})
    limits = {"cpu": CPU_BYTES, "cuda:0": GPU_BYTES, "cuda:1": 0}  # of which this machine has the first alone
    monkeypatch.setattr("torch_lms.chunk.budget.core.memory_report", lambda name: {"limit_bytes": limits[name]})
    monkeypatch.setattr("torch_lms.chunk.budget.core.total_bytes", lambda _: ALL_BYTES)
    assert budget_of(torch.device(device), None, None).device_bytes == expected
    assert budget_of(torch.device(device), "1GiB", None).device_bytes == 1 << 30


def test_the_cpus_limit_holds_for_as_long_as_automatic_mode(paged: Any) -> None:
    paged.enable({"cpu": CPU_BYTES})
    assert budget_of(CPU, None, None).device_bytes == CPU_BYTES
    paged.disable()
    assert budget_of(CPU, None, None).device_bytes == core.total_bytes("cpu")


def test_a_runtime_without_limits_is_not_asked_for_them(paged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch_lms.chunk.budget.core.memory_report")  # as the fork's has none
    assert budget_of(CPU, None, None).device_bytes == core.total_bytes("cpu")


@pytest.mark.parametrize(("optimizer", "nbytes"), [("AdamW", 8), ("SGD", 0), ("SGD with momentum", 4)])
def test_an_optimizer_is_tried_and_stays_as_it_is(optimizer: str, nbytes: int) -> None:
    parameter = torch.ones(3, requires_grad=True)
    tried = OPTIMIZERS[optimizer]([parameter])
    assert state_bytes_each(tried, CPU) == nbytes
    assert treats_each_element_alone(tried, CPU)
    assert not tried.state
    assert parameter.grad is None
    assert torch.equal(parameter, torch.ones(3))


def test_optimizers_that_see_whole_tensors_are_found() -> None:
    optimize: Optimize = OPTIMIZERS["Adafactor"]
    assert not treats_each_element_alone(optimize([torch.ones(2, 2, requires_grad=True)]), CPU)
    assert not treats_each_element_alone(torch.optim.Muon([torch.ones(2, 2, requires_grad=True)]), CPU)
