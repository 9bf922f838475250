from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional

from torch_lms.balanced import BalanceConfig, create_balanced_partition, plan_balanced_partition
from torch_lms.errors import LmsError, PartitionError, ProfileError
from torch_lms.profile.profiler import ProfileConfig
from torch_lms.stages.running import run_stages
from torch_lms.stages.state_dicts import merge_state_dicts

QUICK = BalanceConfig(profile=ProfileConfig(warmup_runs=1, timed_runs=2, progress=False))


class Unequal(nn.Module):
    """Layers of growing width, tied at both ends."""

    def __init__(self) -> None:
        super().__init__()
        widths = [8, 8, 64, 64, 8]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.embed = nn.Embedding(10, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, scale: float = 1.0, final: bool = True) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = functional.gelu(layer(x))
        return self.head(x) * scale if final else x


IDS = torch.arange(8).view(2, 4) % 10
SEES_META_STORAGES = hasattr(torch.Tensor, "untyped_storage")
meta_storages = pytest.mark.skipif(not SEES_META_STORAGES, reason="Python does not see storages on the meta device")


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_stages_run_like_the_model_and_hold_all_of_it(stages: int) -> None:
    torch.manual_seed(0)
    model = Unequal()
    made = create_balanced_partition(model, ["cpu"] * stages, IDS, config=QUICK)
    assert [stage.index for stage in made] == list(range(stages))
    assert torch.equal(run_stages(made, IDS), model(IDS))
    assert merge_state_dicts(made).keys() == model.state_dict().keys()


@meta_storages
def test_meta_model_is_cut_by_sizes_and_materialised() -> None:
    model = Unequal()
    meta = Unequal().to("meta")
    meta.head.weight = meta.embed.weight
    config = BalanceConfig(profile=QUICK.profile, state_dict=model.state_dict())
    made = create_balanced_partition(meta, ["cpu", "cpu"], IDS.to("meta"), config=config)
    assert all(not value.is_meta for stage in made for value in stage.parameters())
    assert torch.equal(run_stages(made, IDS), model(IDS))
    plan = plan_balanced_partition(meta, ["cpu", "cpu"], IDS.to("meta"), config=QUICK)
    assert plan.profile is not None
    assert not plan.profile.timed
    assert plan.partition.algorithm == "parameters"


def test_constants_may_be_given_again_but_not_changed() -> None:
    model = Unequal()
    made = create_balanced_partition(model, ["cpu", "cpu"], IDS, config=QUICK, final=False)
    assert torch.equal(run_stages(made, IDS, final=False), model(IDS, final=False))
    with pytest.raises(PartitionError, match=r"final=False.*constant.*found True"):
        run_stages(made, IDS, final=True)


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:  # the line that cannot be traced
            return x * 2
        return x + 1


def test_what_cannot_be_traced_is_an_error_that_names_the_line() -> None:
    with pytest.raises(LmsError, match=r"test_balanced\.py:\d+: if x\.sum\(\) > 0"):
        create_balanced_partition(Branching(), ["cpu"], torch.ones(2), config=QUICK)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.odd, self.last = nn.Linear(2, 2), Branching(), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.odd(self.first(x)))


def test_a_part_that_cannot_be_traced_stays_whole_with_a_warning_that_names_the_line() -> None:
    model, x = Mixed(), torch.ones(2)
    with pytest.warns(UserWarning, match=r"test_balanced\.py:\d+: if x\.sum\(\) > 0"):
        made = create_balanced_partition(model, ["cpu", "cpu"], x, config=QUICK)
    assert torch.equal(run_stages(made, x), model(x))


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (["cpu"] * 99, "99 stages"),
        (["cpu", "cuda:99"], "cuda:99"),
        (["cpu", "nonsense"], "nonsense"),
        ([], "at least one device"),
    ],
)
def test_bad_devices_and_too_many_stages_are_refused(devices: list[str], message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        create_balanced_partition(Unequal(), devices, IDS, config=QUICK)


@pytest.mark.skipif(SEES_META_STORAGES, reason="this PyTorch can tell meta storages apart")
def test_old_pytorch_says_that_it_cannot_cut_a_meta_model() -> None:
    with pytest.raises(ProfileError, match="build the model on the CPU"):
        create_balanced_partition(Unequal().to("meta"), ["cpu", "cpu"], IDS.to("meta"), config=QUICK)


@meta_storages
def test_a_stage_of_another_rank_stays_where_it_is() -> None:
    meta = Unequal().to("meta")
    meta.head.weight = meta.embed.weight
    made = create_balanced_partition(meta, ["rank:0/cpu", "rank:1/cpu"], IDS.to("meta"), config=QUICK)
    assert all(not value.is_meta for value in made[0].parameters())
    assert all(value.is_meta for value in made[1].parameters())


def test_a_cap_that_nothing_fits_is_refused() -> None:
    config = BalanceConfig(profile=QUICK.profile, memory_cap_bytes=1000)
    with pytest.raises(PartitionError, match="least cap"):
        create_balanced_partition(Unequal(), ["cpu", "cpu"], IDS, optimizer="adamw", config=config)
