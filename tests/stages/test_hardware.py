"""Speeds of the devices that stages run on; no CUDA is needed, as the work itself is not done."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.pipeline.ranks import run_ranks
from torch_lms.balanced import BalanceConfig, plan_balanced_partition
from torch_lms.hardware import DeviceSpeeds
from torch_lms.partition.link_spec import LinkSpec
from torch_lms.profile.profiler import ProfileConfig
from torch_lms.ranks.circle import Circle
from torch_lms.ranks.members import find_members
from torch_lms.stages.placement import parse_placement

CPU = torch.device("cpu")
CUDA = [torch.device(f"cuda:{index}") for index in range(2)]
QUICK = BalanceConfig(profile=ProfileConfig(warmup_runs=0, timed_runs=1, progress=False), links=LinkSpec())


def working(*times_us: float) -> Any:
    """In place of the work: what it takes on each device."""

    def work_us(devices: Collection[torch.device], _rest_share: float) -> Mapping[torch.device, float]:
        return {device: times_us[device.index] for device in devices}

    return mock.patch("torch_lms.profile.speeds.work_us", work_us)


def failing(words: str) -> Any:
    return mock.patch("torch_lms.profile.speeds.work_us", mock.Mock(side_effect=RuntimeError(words)))


def speeds(*places: str, profiled: torch.device = CUDA[0], circle: Circle | None = None) -> DeviceSpeeds:
    made = DeviceSpeeds(circle, [parse_placement(place) for place in places], profiled, 0.1)
    made.measure()
    return made


@pytest.mark.parametrize(
    ("places", "profiled", "expected"),
    [
        (["cuda:0", "cuda:1"], CUDA[0], [1.0, 0.8]),
        (["cuda:0", "cuda:1"], CUDA[1], [1.25, 1.0]),
        (["cuda:0", "cuda:1", "cuda:0", "cuda:1"], CUDA[0], [1.0, 0.8, 1.0, 0.8]),
        (["cuda:1", "cpu"], CUDA[0], [1.0, 1.0]),
        (["cuda:0", "cuda:1"], CPU, [1.0, 1.0]),
        (["cuda:1", "cuda:1"], CUDA[0], [1.0, 1.0]),
        (["cuda:0", "cuda:2"], CUDA[0], [1.0, 1.0]),  # as far apart as two measurements may be
    ],
)
def test_speeds_are_those_beside_the_profiled_device(
    places: list[str], profiled: torch.device, expected: list[float]
) -> None:
    with working(100.0, 125.0, 96.0), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert speeds(*places, profiled=profiled).of_stages() == expected


def test_without_memory_for_the_work_devices_are_taken_to_be_equal() -> None:
    with failing("CUDA out of memory"):
        assert speeds("cuda:0", "cuda:1").of_stages() == [1.0, 1.0]
    with failing("an illegal memory access"), pytest.raises(RuntimeError, match="illegal"):
        speeds("cuda:0", "cuda:1")


def test_given_speeds_are_those_of_the_partition() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    given = BalanceConfig(profile=QUICK.profile, links=LinkSpec(), speeds={"cpu:1": 100.0})
    plan = plan_balanced_partition(model, ["cpu", "cpu:1"], torch.ones(2, 64), config=given)
    assert plan.partition.speeds == (1.0, 100.0)
    assert plan.profile is not None
    stage_us = plan.partition.figures.stage_forward_us
    assert sum(stage_us) < plan.profile.forward_us / 2  # most of it is where it is fast


def test_nothing_is_measured_for_a_model_without_values() -> None:
    with failing("it is not measured"), mock.patch("torch_lms.balanced.find_device", torch.device):
        model = nn.Sequential(nn.Linear(4, 4, device="meta"), nn.Linear(4, 4, device="meta"))
        plan = plan_balanced_partition(model, ["cuda:0", "cuda:1"], torch.ones(2, 4), config=QUICK)
    assert plan.partition.speeds == (1.0, 1.0)


PLACES = ("rank:0/cuda:0", "rank:1/cuda:1", "rank:1/cuda:1")


def each_rank_measures_its_own(rank: int, world: int) -> None:
    with working(100.0, 125.0):
        found = speeds(*PLACES, circle=Circle(find_members(None, "group"), "speeds"))
    if rank == 0:
        assert found.of_stages() == [1.0, 0.8, 0.8]
    dist.barrier()


def who_tells_nothing_is_taken_to_be_as_fast(rank: int, world: int) -> None:
    circle = Circle(find_members(None, "group"), "speeds")
    with failing("CUDA out of memory") if rank == 1 else working(100.0, 125.0):
        found = speeds(*PLACES, circle=circle)
    silent = Circle(find_members(None, "group"), "speeds")
    with working(100.0, 125.0):
        alone = speeds(*PLACES, circle=silent) if rank == 0 else None
    with mock.patch("torch_lms.hardware._LATE_S", 0.1):
        for one in (found, alone) if rank == 0 else ():
            assert one is not None
            with pytest.warns(UserWarning, match="speeds guessed: .* none of rank:1/cuda:1; that"):
                assert one.of_stages() == [1.0, 1.0, 1.0]
    dist.barrier()


def test_two_ranks_tell_the_first_one(tmp_path: Path) -> None:
    scenarios = f"{each_rank_measures_its_own.__name__}+{who_tells_nothing_is_taken_to_be_as_fast.__name__}"
    for ended in run_ranks(f"tests.stages.test_hardware:{scenarios}", 2, tmp_path):
        assert ended.status == 0, ended.output
