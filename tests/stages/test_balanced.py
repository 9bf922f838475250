from __future__ import annotations

import itertools
import re
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from torch_lms import balanced
from torch_lms.balanced import BalanceConfig, create_balanced_partition, plan_balanced_partition
from torch_lms.errors import LimitError, LmsError, PartitionError, ProfileError
from torch_lms.partition.costs import CostModel, DataParallel, optimizer_multiplier
from torch_lms.partition.interface import Partition, PartitionProblem
from torch_lms.partition.link_spec import LinkSpec
from torch_lms.profile import links
from torch_lms.profile.document import LinkProfile
from torch_lms.profile.profiler import ProfileConfig, profile
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
        if x.sum() > 0:
            return x * 2
        return x + 1


class Unseen(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.detach().numpy().sum() > 0:  # the line that cannot be traced
            return x * 2
        return x + 1


def test_what_cannot_be_traced_is_an_error_that_names_the_line() -> None:
    with pytest.raises(LmsError, match=r"test_balanced\.py:\d+: if x\.detach\(\)\.numpy\(\)\.sum\(\) > 0"):
        create_balanced_partition(Unseen(), ["cpu"], torch.ones(2), config=QUICK)


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
    with pytest.warns(UserWarning, match="links guessed: .* between rank:0/cpu, rank:1/cpu; 1 GB/s"):
        made = create_balanced_partition(meta, ["rank:0/cpu", "rank:1/cpu"], IDS.to("meta"), config=QUICK)
    assert all(not value.is_meta for value in made[0].parameters())
    assert all(value.is_meta for value in made[1].parameters())


@pytest.mark.parametrize("cap", [1000, "1000", "1kB"])
def test_a_cap_that_nothing_fits_is_refused(cap: int | str) -> None:
    config = BalanceConfig(profile=QUICK.profile, memory_cap_bytes=cap)
    with pytest.raises(PartitionError, match="least cap"):
        create_balanced_partition(Unequal(), ["cpu", "cpu"], IDS, optimizer="adamw", config=config)


@pytest.mark.parametrize("cap", ["40 elephants", "0GiB", "0%"])
def test_a_cap_that_is_no_size_is_refused(cap: str) -> None:
    with pytest.raises(LimitError, match="expected a size"):
        BalanceConfig(memory_cap_bytes=cap)


def test_a_share_of_a_device_whose_memory_nobody_knows_is_refused() -> None:
    config = BalanceConfig(profile=QUICK.profile, memory_cap_bytes="50%")
    with pytest.raises(LimitError, match="found the percentage '50%'; name a size"):
        create_balanced_partition(Unequal(), ["cpu", "cpu"], IDS, config=config)


# --- where it is profiled ------------------------------------------------------------------------------------


class Making(nn.Module):
    """Makes tensors on the device of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x) + torch.arange(4, device=x.device))


# To PyTorch cpu:1 is a device of its own.
@pytest.mark.parametrize(
    ("devices", "expected"),
    [(["cpu:1", "cpu"], "cpu:1"), (["rank:1/cuda:0", "cpu:1"], "cpu:1"), (["cpu", "cpu:1"], "cpu")],
)
def test_the_first_device_that_is_here_is_profiled(devices: list[str], expected: str, chaos: bool) -> None:
    model = Making()
    home = [value.data_ptr() for value in model.parameters()]
    config = BalanceConfig(profile=QUICK.profile, links=LinkSpec())
    plan = plan_balanced_partition(model, devices, torch.ones(2, 4), config=config)
    assert plan.profile is not None
    assert (plan.profile.device, plan.profile.timed) == (expected, True)
    assert chaos or [value.data_ptr() for value in model.parameters()] == home  # where they are is chaos's own


def test_a_device_that_the_configuration_names_is_profiled() -> None:
    config = BalanceConfig(profile=replace(ProfileConfig(warmup_runs=0, timed_runs=1), device="cpu"), links=LinkSpec())
    plan = plan_balanced_partition(Making(), ["cpu:1", "cpu:1"], torch.ones(2, 4), config=config)
    assert plan.profile is not None
    assert plan.profile.device == "cpu"


@pytest.mark.parametrize(("microbatches", "asked", "expected"), [(4, None, 0.2), (4, 0.0, 0.0), (1, None, 0.5)])
def test_a_profile_rests_as_the_schedule_does(
    microbatches: int, asked: float | None, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float | None] = []

    def seeing(*args: Any, config: ProfileConfig, **kwargs: Any) -> Any:
        seen.append(config.rest_share)
        return profile(*args, config=config, **kwargs)

    monkeypatch.setattr("torch_lms.profile.profiler.profile", seeing)
    assert QUICK.profile is not None
    config = replace(QUICK, profile=replace(QUICK.profile, rest_share=asked), cost=CostModel(microbatches=microbatches))
    devices = ["cpu", "cpu:1"] if microbatches > 1 else ["cpu", "cpu:1", "cpu:2"]
    plan_balanced_partition(Making(), devices, torch.ones(2, 4), config=replace(config, links=LinkSpec()))
    assert seen == [pytest.approx(expected)]


# --- links ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("own", "rate"), [(None, 1e-4), (LinkSpec(bytes_per_us=1e-5), 1e-5)])
def test_copies_are_as_far_from_each_other_as_the_slowest_link(own: LinkSpec | None, rate: float) -> None:
    """The ring of two sends all bytes of a stage's gradients, most of them when its backward is over."""
    links = {("cpu", "cpu:1"): LinkSpec(bytes_per_us=1e-4), ("cpu:1", "cpu"): LinkSpec()}
    cost = CostModel(microbatches=1, data_parallel=DataParallel(ranks=2, link=own, bucket_bytes=16))
    config = BalanceConfig(profile=QUICK.profile, links=links, cost=cost)
    plan = plan_balanced_partition(Making(), ["cpu", "cpu:1"], torch.ones(2, 4), config=config)
    gradient_bytes = sum(value.numel() * value.element_size() for value in Making().parameters())
    assert plan.partition.figures.step.step_us > gradient_bytes / 2 / rate  # of the stage that has more of them


def measured(monkeypatch: pytest.MonkeyPatch, rate: float) -> list[tuple[str, str]]:
    """Measures links without copies, and notes which."""
    asked: list[tuple[str, str]] = []

    def measure_link(source: str, target: str) -> LinkProfile:
        asked.append((source, target))
        return LinkProfile(source=source, target=target, bytes_per_us=rate, latency_us=0.0)

    monkeypatch.setattr(links, "measure_link", measure_link)
    return asked


def links_of_the_problem(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    original = balanced.partition

    def partition(problem: PartitionProblem, algorithm: Any) -> Partition:
        found.append(problem.links)
        return original(problem, algorithm)

    monkeypatch.setattr(balanced, "partition", partition)
    return found


def test_links_between_devices_of_this_process_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, used = measured(monkeypatch, rate=2.0), links_of_the_problem(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan_balanced_partition(Making(), ["cpu", "cpu:1"], torch.ones(2, 4), config=QUICK)
    assert asked == [("cpu", "cpu:1"), ("cpu:1", "cpu")]
    assert used == [dict.fromkeys(asked, LinkSpec(bytes_per_us=2.0))]


@pytest.mark.parametrize(
    ("devices", "links_measured", "told"),
    [
        (["cpu", "cpu:1"], False, "between cpu, cpu:1; 1 GB/s and 100 us are taken"),
        (["cpu", "rank:1/cpu:1"], True, "between cpu, rank:1/cpu:1; those between the devices of these names"),
        (["cpu", "rank:1/cpu"], True, "between cpu, rank:1/cpu; 1 GB/s"),
    ],
)
def test_links_that_are_guessed_are_named(
    devices: list[str], links_measured: bool, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(monkeypatch, rate=2.0)
    config = BalanceConfig(profile=ProfileConfig(warmup_runs=0, timed_runs=1, links=links_measured))
    with pytest.warns(UserWarning, match=re.escape(told)):
        plan_balanced_partition(Making(), devices, torch.ones(2, 4), config=config)


def test_on_one_device_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, used = measured(monkeypatch, rate=2.0), links_of_the_problem(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan_balanced_partition(Making(), ["cpu", "cpu"], torch.ones(2, 4), config=QUICK)
    assert asked == []
    assert used == [{}]


# --- optimizers ----------------------------------------------------------------------------------------------


def state_bytes(optimizer: Any) -> int:
    """What one stage of a model that is trained so takes besides what it takes with SGD."""
    model, x = Making(), torch.ones(2, 4)
    found = [
        plan_balanced_partition(model, ["cpu"], x, optimizer=given, config=QUICK).partition.stage_memory_bytes[0]
        for given in (optimizer(model) if getattr(optimizer, "__name__", "") == "<lambda>" else optimizer, "sgd")
    ]
    return found[0] - found[1]


class NeedsRate(torch.optim.SGD):
    """Has no default for the rate, as SGD of PyTorch 1.12."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, momentum=0.9)


BYTES = sum(value.numel() * 4 for value in Making().parameters())


@pytest.mark.parametrize(
    ("optimizer", "copies", "counters"),
    [
        ("sgd", 0, 0),
        ("AdamW", 2, 0),
        (None, 2, 0),
        (torch.optim.SGD, 0, 0),
        (torch.optim.AdamW, 2, 4),
        (torch.optim.Adagrad, 1, 4),
        (NeedsRate, 1, 0),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), 1, 0),
        (lambda model: torch.optim.SGD(model.parameters(), lr=0.1), 0, 0),
        (lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), 1, 0),
        (lambda model: torch.optim.Adam(model.parameters()), 2, 4),
    ],
)
def test_an_optimizer_is_priced_by_its_name_class_and_options(optimizer: Any, copies: int, counters: int) -> None:
    """State in copies of the parameters, and some counters for each of the four."""
    assert state_bytes(optimizer) - copies * BYTES in {0, len(list(Making().parameters())) * counters}


def test_a_class_is_in_the_table_of_names() -> None:
    assert [optimizer_multiplier(kind) for kind in (torch.optim.SGD, torch.optim.AdamW)] == [2, 4]
    with pytest.raises(PartitionError, match="found 'needsrate'"):
        optimizer_multiplier(NeedsRate)


@pytest.mark.parametrize("optimizer", ["lion", 3])
def test_what_is_no_known_optimizer_is_refused_and_the_known_are_named(optimizer: Any) -> None:
    with pytest.raises(PartitionError, match=rf"among sgd, adam, adamw, .* found {optimizer!r}"):
        create_balanced_partition(Making(), ["cpu"], torch.ones(2, 4), optimizer=optimizer, config=QUICK)


@meta_storages
def test_an_optimizer_is_measured_for_a_model_on_the_meta_device() -> None:
    plan = plan_balanced_partition(
        Making().to("meta"), ["cpu"], torch.ones(2, 4, device="meta"), optimizer=torch.optim.AdamW, config=QUICK
    )
    assert plan.profile is not None
    assert sum((plan.profile.optimizer_bytes or {}).values()) >= 2 * BYTES


def test_two_arguments_that_are_one_tensor_stay_two() -> None:
    class Difference(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a - 2 * b

    x, y = torch.ones(3), torch.full((3,), 5.0)
    made = create_balanced_partition(Difference(), ["cpu", "cpu"], x, x, config=QUICK)
    assert torch.equal(made(x, y), x - 2 * y)


# --- speeds --------------------------------------------------------------------------------------------------


def test_speeds_that_are_given_are_counted() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    config = replace(QUICK, links=LinkSpec(), speeds={torch.device("cpu:1"): 100.0})
    plan = plan_balanced_partition(model, ["cpu", torch.device("cpu:1")], torch.ones(2, 64), config=config)
    assert plan.partition.speeds == (1.0, 100.0)
    assert plan.profile is not None
    taken_us = [0.0, 0.0]
    for node in plan.profile.nodes:
        stage = plan.partition.stage_of[node.name]
        taken_us[stage] += node.forward_us / plan.partition.speeds[stage]
    assert plan.partition.figures.stage_forward_us == pytest.approx(taken_us)


def test_speeds_are_of_the_devices() -> None:
    config = replace(QUICK, links=LinkSpec(), speeds={"cpu:7": 2.0})
    with pytest.raises(PartitionError, match="expected speeds of devices among cpu, cpu:1, found one of cpu:7; name"):
        plan_balanced_partition(Making(), ["cpu", "cpu:1"], torch.ones(2, 4), config=config)
    for speed in (0.0, -1.0, float("nan"), float("inf"), "fast", None):
        with pytest.raises(ValueError, match="expected a positive and finite speed of cpu, found"):
            BalanceConfig(speeds={"cpu": speed})  # type: ignore[dict-item]


class Fixed:
    name, source = "fixed", "here"

    def partition(self, problem: PartitionProblem) -> Any:
        return None


ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"devices": 2}, r"a device for each stage, found 2; give a list"),
    ({"devices": "cpu"}, r"a device for each stage, found 'cpu'; give a list"),
    ({"devices": iter([])}, "at least one device, found none"),
    ({"config": QUICK.profile}, r"a BalanceConfig as config, found ProfileConfig; a ProfileConfig goes into"),
    ({"config": {}}, "a BalanceConfig as config, found dict"),
    ({"algorithm": None}, "the name of an algorithm or an object with a method partition, found None"),
    ({"algorithm": Fixed}, "the name of an algorithm .* or make an object of a class"),
    ({"algorithm": Fixed()}, r"a Partition from the algorithm .*, found None"),
]


@pytest.mark.parametrize(("given", "message"), ARGUMENTS)
def test_wrong_arguments_are_named(given: dict[str, Any], message: str) -> None:
    options = {"devices": ["cpu", "cpu"], "config": QUICK, **given}
    with pytest.raises(PartitionError, match=f"expected {message}"):
        create_balanced_partition(Unequal(), options.pop("devices"), IDS, **options)


def test_devices_may_come_one_by_one() -> None:
    made = create_balanced_partition(Unequal(), (device for device in ("cpu", "cpu")), IDS, config=QUICK)
    assert len(made) == 2


@pytest.mark.parametrize(
    "given",
    [
        {"profile": 3},
        {"cost": None},
        {"links": 3},
        {"speeds": [1, 2]},
        {"speeds": {"cpu": True}},
        {"memory_cap_bytes": True},
        {"memory_cap_bytes": 1.5},
        {"relief": 3},
        {"materialize": 1},
        {"state_dict": 3},
        {"init_fn": 3},
    ],
)
def test_a_config_checks_its_types(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"expected .*found"):
        BalanceConfig(**given)


class Nothing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_a_model_that_computes_nothing_is_named_so() -> None:
    with pytest.raises(PartitionError, match="a graph with operations to cut, found none"):
        create_balanced_partition(Nothing(), ["cpu"], torch.ones(2), config=QUICK)
