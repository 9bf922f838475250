"""`create_balanced_partition` called by two ranks alike."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.pipeline.ranks import run_ranks
from torch_lms._torch_compat import has_export
from torch_lms.balanced import BalanceConfig, create_balanced_partition
from torch_lms.errors import PartitionError, ProfileError
from torch_lms.partition.algorithms.block import BalanceByTime
from torch_lms.partition.interface import Partition, PartitionProblem
from torch_lms.partition.link_spec import LinkSpec
from torch_lms.profile.profiler import ProfileConfig

PROFILE = ProfileConfig(warmup_runs=0, timed_runs=1, progress=False)
X = torch.arange(8.0).view(2, 4)


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(4)]
    layers[3].weight = layers[0].weight
    return nn.Sequential(*layers)


def stages_train_on_the_ranks_of_their_places(rank: int, world: int) -> None:
    from torch_lms.pipeline import Pipeline

    config = BalanceConfig(profile=PROFILE, links=LinkSpec())
    stages = create_balanced_partition(model(), ["cpu", "cpu"], X, config=config)
    assert [str(stage.placement) for stage in stages] == ["rank:0/cpu", "rank:1/cpu"]
    assert {name for name, _ in stages.named_parameters()} == {name for name, _ in stages[rank].named_parameters()}
    with pytest.raises(PartitionError, match=f"found stage {1 - rank} on rank:{1 - rank}/cpu"):
        stages(X)
    whole = model()
    expected = whole(X).square().mean()
    expected.backward()
    with Pipeline(stages, loss=lambda found, _: found.square().mean()) as pipeline:
        loss = pipeline.step(X, target=X)
        gradients = {name: value.grad for stage in pipeline.stages for name, value in stage.named_parameters()}
    assert rank == 0 or (loss is not None and torch.equal(loss, expected))
    known = whole.state_dict(keep_vars=True)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, known[name].grad), name


def the_first_rank_fails(rank: int, world: int) -> None:
    config = BalanceConfig(profile=PROFILE, links=LinkSpec(), memory_cap_bytes=10)
    with pytest.raises(PartitionError, match="least cap") as caught:
        create_balanced_partition(model(), ["cpu", "cpu"], X, config=config)
    assert ("found that it failed" in str(caught.value)) == (rank == 1)


def the_first_rank_fails_before_its_profile(rank: int, world: int) -> None:
    whole = model()
    if rank == 0:
        whole.register_buffer("elsewhere", torch.ones(1, device="meta"))
    with (
        pytest.raises((PartitionError, ProfileError), match="on one device"),
        mock.patch("torch_lms.balanced._DECIDING_S", 30.0),
    ):
        create_balanced_partition(whole, ["cpu", "cpu"], X, config=BalanceConfig(profile=PROFILE, links=LinkSpec()))


def what_the_first_rank_cannot_tell_is_an_error_everywhere(rank: int, world: int) -> None:
    def dumps(value: Any) -> bytes:
        if isinstance(value[0], Partition):
            raise pickle.PicklingError("a partition that cannot be told")
        return pickle.dumps(value)

    config = BalanceConfig(profile=PROFILE, links=LinkSpec())
    instead = mock.patch("torch_lms.balanced.pickle", mock.Mock(dumps=dumps, loads=pickle.loads))
    with instead, pytest.raises((PartitionError, pickle.PicklingError), match="that cannot be told"):
        create_balanced_partition(model(), ["cpu", "cpu"], X, config=config)


def a_call_that_failed_on_one_rank_is_not_taken_for_the_next(rank: int, world: int) -> None:
    """Rank 0 makes the first call whole; it waits for the other not longer than it must."""
    config = BalanceConfig(profile=PROFILE, links=LinkSpec())
    wide = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    with mock.patch("torch_lms.balanced._HEARING_S", 0.1):
        if rank == 1:
            with pytest.raises(PartitionError, match="at least one device"):
                create_balanced_partition(model(), [], X, config=config)
        else:
            create_balanced_partition(model(), ["cpu", "cpu"], X, config=config)
        stages = create_balanced_partition(wide, ["cpu", "cpu"], X, algorithm="uniform", config=config)
    assert stages.partition is not None
    cuts: list[Any] = [None] * world
    dist.all_gather_object(cuts, stages.partition.algorithm)
    assert cuts == ["uniform"] * world


def who_comes_late_hears_of_it(rank: int, world: int) -> None:
    """Although rank 0, which may hold the store, is done; the last scenario, after which it ends."""
    config = BalanceConfig(profile=PROFILE, links=LinkSpec(), memory_cap_bytes=10)
    time.sleep(2 * rank)
    with pytest.raises(PartitionError, match="least cap"):
        create_balanced_partition(model(), ["cpu", "cpu"], X, config=config)


def interrupted(rank: int, world: int) -> None:
    class Interrupted(BalanceByTime):
        def partition(self, problem: PartitionProblem) -> Partition:
            raise KeyboardInterrupt

    config = BalanceConfig(profile=PROFILE, links=LinkSpec())
    with pytest.raises(KeyboardInterrupt if rank == 0 else PartitionError):
        create_balanced_partition(model(), ["cpu", "cpu"], X, algorithm=Interrupted(), config=config)
    dist.barrier()


def speeds_go_by_names_as_they_are_given(rank: int, world: int) -> None:
    for speeds, expected in (({"cpu": 3.0}, (3.0, 3.0)), ({"rank:1/cpu": 3.0}, (1.0, 3.0))):
        config = BalanceConfig(profile=PROFILE, links=LinkSpec(), speeds=speeds)
        stages = create_balanced_partition(model(), ["cpu", "cpu"], X, config=config)
        assert stages.partition is not None
        assert stages.partition.speeds == expected


def nothing_waits_on_a_device(rank: int, world: int) -> None:
    """No collective runs: under NCCL that would be a kernel."""
    dist.barrier()
    before = dist.group.WORLD._get_sequence_number_for_group()
    for _ in range(2):
        create_balanced_partition(model(), ["cpu", "cpu"], X, config=BalanceConfig(profile=PROFILE, links=LinkSpec()))
    assert dist.group.WORLD._get_sequence_number_for_group() == before > 0


def test_two_ranks_call_it_alike(tmp_path: Path) -> None:
    scenarios = (
        stages_train_on_the_ranks_of_their_places,
        the_first_rank_fails,
        *([the_first_rank_fails_before_its_profile] if has_export() else []),  # older ones trace no such model
        what_the_first_rank_cannot_tell_is_an_error_everywhere,
        a_call_that_failed_on_one_rank_is_not_taken_for_the_next,
        interrupted,
        speeds_go_by_names_as_they_are_given,
        *([nothing_waits_on_a_device] if has_export() else []),  # older ones do not count collectives
        who_comes_late_hears_of_it,
    )
    names = "+".join(scenario.__name__ for scenario in scenarios)
    for ended in run_ranks(f"tests.stages.test_balanced_on_ranks:{names}", 2, tmp_path, store="tcp"):
        assert ended.status == 0, ended.output
