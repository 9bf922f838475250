"""Plans of models that have not trained yet: what they predict is what a training takes."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # PyTorch's own name for it

import torch_lms
from benchmarks.unet3d import UNet3d
from tests.unit.trainings import (
    GPT_TRAINING,
    LARGE_STATE_TRAINING,
    MIN_BYTES,
    RESNET_TRAINING,
    Training,
    one_thread,
)
from torch_lms.balanced import BalanceConfig, create_balanced_partition
from torch_lms.cli import main
from torch_lms.errors import LimitError, ProfileError
from torch_lms.fitting import DeviceRates, FitConfig, trace_step
from torch_lms.plan import Link, Trace, TraceStorage, least_limit, make_plan, simulate
from torch_lms.profile import ProfileConfig, profile

TRAININGS = [GPT_TRAINING, RESNET_TRAINING, LARGE_STATE_TRAINING]
GIB = 1 << 30
QUICK = ProfileConfig(warmup_runs=0, timed_runs=1, progress=False)
IN_PIECES = ProfileConfig(warmup_runs=0, timed_runs=1, progress=False, pieces=True)
LINK = Link(out_bytes_per_us=1e4, in_bytes_per_us=1e4)
RATES = DeviceRates(flops_per_us=1e6, memory_bytes_per_us=1e5, link=LINK)
RATED = FitConfig(rates=RATES, min_bytes=MIN_BYTES)
TINY = ["--model=gpt", "--layers=1", "--width=8", "--heads=2", "--tokens=16", "--batch=1", "--min-bytes=1KiB"]
RATE_WORDS = ["--tflops=100", "--memory-gb-per-s=1000", "--link-gb-per-s=20"]


class WithLoss(nn.Module):
    """A model that returns its loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.inner(x), target)


def model_of(training: Training) -> nn.Module:
    torch.manual_seed(0)
    return WithLoss(training.make())


def config_of(measuring: ProfileConfig) -> FitConfig:
    return FitConfig(profile=measuring, min_bytes=MIN_BYTES)


def traced(training: Training, config: FitConfig, **kwargs: Any) -> Trace:
    return trace_step(model_of(training), *training.batch(0), config=config, optimizer=torch.optim.AdamW, **kwargs)


def plain_peak_bytes(trace: Trace) -> int:
    return simulate(trace, []).peak_bytes


def measured_peak_bytes(training: Training) -> int:
    """Of a training under a limit that it never reaches."""
    gc.collect()
    torch_lms.enable({"cpu": 1 << 30}, min_bytes=MIN_BYTES)
    before_bytes = torch_lms.stats().allocated_bytes
    model, batch = model_of(training), training.batch(0)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        torch_lms.stats(reset=True)
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = torch_lms.stats().peak_allocated_bytes - before_bytes
    torch_lms.disable()
    return found


# --- memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", TRAININGS, ids=lambda training: training.name)
@one_thread()
def test_the_predicted_peak_is_that_of_a_training(training: Training, chaos: bool) -> None:
    predicted_bytes = plain_peak_bytes(traced(training, config_of(QUICK)))
    if not chaos:  # storages that go out at random lower the peak
        assert predicted_bytes == pytest.approx(measured_peak_bytes(training), rel=0.03)


@pytest.mark.parametrize("training", TRAININGS, ids=lambda training: training.name)
@pytest.mark.parametrize("config", [config_of(IN_PIECES), RATED], ids=["pieces", "rates"])
@one_thread()
def test_what_does_not_run_whole_has_the_same_peak(training: Training, config: FitConfig, chaos: bool) -> None:
    if chaos:
        pytest.skip("what can be made again holds what it is made from")
    whole = traced(training, config_of(QUICK))
    assert plain_peak_bytes(traced(training, config)) == pytest.approx(plain_peak_bytes(whole), rel=0.01)


def test_a_model_without_values_has_the_same_peak() -> None:
    with torch.device("meta"):
        model = WithLoss(GPT_TRAINING.make())
    batch = [tensor.to("meta") for tensor in GPT_TRAINING.batch(0)]
    found = trace_step(model, *batch, optimizer=torch.optim.AdamW, config=RATED)
    assert plain_peak_bytes(found) == plain_peak_bytes(traced(GPT_TRAINING, RATED))


def test_the_optimizers_state_lasts_and_gradients_end_with_its_step() -> None:
    model, batch = model_of(LARGE_STATE_TRAINING), LARGE_STATE_TRAINING.batch(0)
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    trained = trace_step(model, *batch, optimizer=torch.optim.AdamW, config=RATED)
    untrained = trace_step(model, *batch, config=RATED)
    assert lasting_bytes(untrained) == parameter_bytes
    assert lasting_bytes(trained) == 3 * parameter_bytes
    assert trained.ops[-1].phase == "other"
    last = len(trained.ops) - 1
    released_bytes = sum(one.bytes for one in trained.storages if one.producer is not None and one.released == last)
    assert released_bytes >= parameter_bytes
    kept = [one for one in untrained.storages if one.producer is not None and one.released is None]
    assert sum(one.bytes for one in kept) == parameter_bytes


def lasting_bytes(trace: Trace) -> int:
    return sum(one.bytes for one in trace.storages if one.lasting)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, lambda found: torch.optim.Adam(found, fused=True)])
def test_optimizers_that_exist_are_read(kind: Callable[..., torch.optim.Optimizer]) -> None:
    model, batch = model_of(LARGE_STATE_TRAINING), LARGE_STATE_TRAINING.batch(0)
    frozen = next(model.parameters()).requires_grad_(False)
    found = trace_step(model, *batch, optimizer=kind(model.parameters()), config=RATED)
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert lasting_bytes(found) == 3 * parameter_bytes - 2 * frozen.nbytes


class Residual(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = x + x.tanh()
        return x.sum()


def test_gradients_that_meet_are_added_in_place() -> None:
    found = trace_step(Residual(), torch.ones(1024).requires_grad_(), config=RATED)
    sums = [place for place, op in enumerate(found.ops) if op.phase == "backward" and op.name == "aten::add"]
    assert len(sums) == 3
    written = [place for storage in found.storages for place in storage.writes]
    assert set(sums) <= set(written)


# --- time ---------------------------------------------------------------------------------------------------


def test_the_ops_of_a_node_share_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    profiles = []

    def noted(*args: Any, **kwargs: Any) -> Any:
        profiles.append(profile(*args, **kwargs))
        return profiles[-1]

    monkeypatch.setattr("torch_lms.fitting.interface.profile", noted)
    found = traced(GPT_TRAINING, config_of(QUICK))
    computing_us = sum(op.duration_us for op in found.ops if op.phase != "other")
    (measured,) = profiles
    assert computing_us == pytest.approx(measured.forward_us + measured.backward_us)
    assert all(op.duration_us > 0 for op in found.ops if op.phase == "other")


def test_rates_say_how_long_ops_take() -> None:
    model = nn.Linear(64, 32, bias=False)
    found = trace_step(model, torch.ones(16, 64), config=RATED)
    (product,) = [op for op in found.ops if op.phase == "forward"]
    moved_bytes = 4 * (16 * 64 + 64 * 32 + 16 * 32)
    flops = 2 * 16 * 64 * 32
    assert product.duration_us == max(flops / RATES.flops_per_us, moved_bytes / RATES.memory_bytes_per_us)
    assert found.link == LINK


# --- what the trace says of storages ------------------------------------------------------------------------


def made_by(trace: Trace, op: str) -> list[TraceStorage]:
    return [one for number, one in enumerate(trace.storages) if trace.op_of(number) == f"aten::{op}"]


def test_only_what_an_op_makes_alike_again_has_a_recipe() -> None:
    gpt, resnet = traced(GPT_TRAINING, RATED), traced(RESNET_TRAINING, RATED)
    (gelu, *_) = made_by(gpt, "gelu")
    assert gelu.recompute is not None
    assert gelu.module == "inner.blocks.0.feed_forward.2"
    assert all(one.recompute is None for one in made_by(gpt, "empty_like"))  # of a drop-out's mask
    normed = [one.recompute for one in made_by(resnet, "native_batch_norm")]
    assert all(one is not None for one in normed)
    rewrites = [[resnet.ops[place].name for place in one.rewrites] for one in normed if one is not None]
    assert rewrites.count(["aten::relu_"]) == 5  # of the stem, and inside of each block
    sums = [one.recompute for one in made_by(resnet, "add") if one.writes and one.module]
    assert sums
    assert all(one is not None and resnet.ops[one.rewrites[-1]].name == "aten::relu_" for one in sums)


class DrawsMask(nn.Module):
    """Dropout as the one op that it is on a GPU."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.linear, self.p = nn.Linear(32, 32), p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.native_dropout(self.linear(x), self.p, True)[0].square().sum()


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_what_dropout_makes_has_a_recipe_from_its_mask(p: float) -> None:
    """That is, where it draws one."""
    trace = trace_step(DrawsMask(p), torch.randn(8, 32), config=RATED)
    made, *masks = made_by(trace, "native_dropout")
    assert all(mask.recompute is None and "random" in mask.why_not_recompute for mask in masks)
    if p == 0:
        assert made.recompute is None
    else:
        assert made.recompute is not None
        assert [trace.storages[number] for number in made.recompute.inputs] == [*made_by(trace, "addmm"), *masks]


def test_small_storages_stay() -> None:
    found = traced(GPT_TRAINING, RATED)
    assert all(one.movable == (one.bytes >= MIN_BYTES) for one in found.storages)


# --- limits -------------------------------------------------------------------------------------------------


@one_thread()
def test_a_plan_keeps_the_limit_or_the_least_limit_is_told() -> None:
    model, batch = model_of(GPT_TRAINING), GPT_TRAINING.batch(0)
    limit_bytes = GPT_TRAINING.limit_bytes
    plan = torch_lms.fit(model, *batch, limit=limit_bytes, optimizer=torch.optim.AdamW, config=config_of(QUICK))
    assert plan.predicted.peak_bytes <= limit_bytes < plan.predicted.plain_peak_bytes
    trace = trace_step(model, *batch, optimizer=torch.optim.AdamW, config=RATED)
    least_bytes = least_limit(trace)
    with pytest.raises(LimitError, match=f"expected a limit of at least {least_bytes} bytes"):
        torch_lms.fit(model, *batch, limit="1B", optimizer=torch.optim.AdamW, config=RATED)
    assert make_plan(trace, least_bytes).predicted.peak_bytes <= least_bytes


def test_what_neither_the_host_nor_one_replay_has_room_for_is_planned() -> None:
    with torch.device("meta"):
        model = UNet3d((32, 64, 128, 256, 320)).bfloat16()
        volumes = torch.empty(36, 4, 128, 128, 128, dtype=torch.bfloat16)
        labels = torch.empty(36, 3, 128, 128, 128)
    rates = DeviceRates(flops_per_us=3e8, memory_bytes_per_us=2e6, link=Link(out_bytes_per_us=5e4, in_bytes_per_us=5e4))
    trace = trace_step(model, volumes, labels, config=FitConfig(rates=rates))
    plan = make_plan(trace, 22 * GIB, host_limit_bytes=85 * GIB, simply=True)
    assert plan.predicted.peak_bytes <= 22 * GIB < 85 * GIB < plan.predicted.plain_peak_bytes
    assert plan.predicted.host_peak_bytes <= 85 * GIB


def test_the_model_is_left_as_it_was() -> None:
    model, batch = model_of(RESNET_TRAINING), RESNET_TRAINING.batch(0)
    next(model.parameters()).grad = marked = torch.ones_like(next(model.parameters()))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    for config in (config_of(QUICK), config_of(IN_PIECES), RATED):
        torch_lms.fit(model, *batch, limit=1 << 30, optimizer=torch.optim.AdamW, config=config)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [one.grad for one in model.parameters() if one.grad is not None] == [marked]
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("config", [config_of(QUICK), config_of(IN_PIECES), RATED], ids=["whole", "pieces", "rates"])
def test_a_model_that_is_not_used_any_more_is_freed(config: FitConfig) -> None:
    model, batch = model_of(GPT_TRAINING), GPT_TRAINING.batch(0)
    torch_lms.fit(model, *batch, limit=1 << 30, optimizer=torch.optim.AdamW, config=config)
    alive = [weakref.ref(one) for one in model.parameters()]
    del model
    gc.collect()
    assert not any(one() is not None for one in alive)


def test_a_stage_of_a_pipeline_is_planned_alone() -> None:
    model, (x, _) = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]), LARGE_STATE_TRAINING.batch(0)
    stages = create_balanced_partition(model, ["cpu", "cpu"], x[:, :64], config=BalanceConfig(profile=QUICK))
    handed = torch.ones(16, 64, requires_grad=True)
    found = [torch_lms.fit(stage, handed, limit=1 << 20, config=RATED) for stage in stages]
    assert all(plan.predicted.plain_peak_bytes < 1 << 20 for plan in found)


# --- errors and the command ---------------------------------------------------------------------------------


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if x.sum() > 0 else x  # the user's line


def test_a_model_that_looks_at_values_must_run() -> None:
    x = torch.ones(2, 4)
    assert torch_lms.fit(Branching(), x, limit=1 << 20, config=config_of(QUICK)).method == "keep"
    with pytest.raises(ProfileError, match=r"(?s)test_fit\.py.*the user's line.*leave pieces and rates out"):
        torch_lms.fit(Branching(), x, limit=1 << 20, config=RATED)


def test_measuring_wants_automatic_mode_off() -> None:
    torch_lms.enable({"cpu": 1 << 30})
    with pytest.raises(ProfileError, match="expected automatic mode to be off"):
        torch_lms.fit(nn.Linear(4, 4), torch.ones(2, 4), limit="1GiB")
    assert torch_lms.fit(nn.Linear(4, 4), torch.ones(2, 4), limit="1GiB", config=RATED).method == "keep"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (len, "expected an nn.Module, found builtin_function_or_method"),
        (nn.Linear(4, 4, device="meta"), "expected a model with values to time it, found Linear on the meta device"),
        (nn.Linear(3, 3), "expected Linear to run with the sample"),
    ],
)
def test_errors_say_what_to_do(model: Any, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        torch_lms.fit(model, torch.ones(2, 4), limit="1GiB", config=config_of(QUICK))


@pytest.mark.parametrize("name", ["Adafactor", "SparseAdam"])
def test_an_optimizer_that_makes_no_step_for_copies_is_told(name: str) -> None:
    kind = getattr(torch.optim, name, None)
    if kind is None:
        pytest.skip(f"this PyTorch has no {name}")
    with pytest.raises(ProfileError, match=r"copies of parameters without values.*or leave the optimizer out"):
        torch_lms.fit(nn.Linear(4, 4), torch.ones(2, 4), limit="1GiB", optimizer=kind, config=config_of(QUICK))


def test_rates_are_positive() -> None:
    with pytest.raises(ProfileError, match="expected rates above 0"):
        DeviceRates(flops_per_us=0.0, memory_bytes_per_us=1.0, link=LINK)


def branching() -> tuple[nn.Module, torch.Tensor]:
    return Branching(), torch.ones(2, 4)


@pytest.mark.parametrize(
    "words",
    [
        [*TINY, "--device=cpu", "--runs=1", "--warmup=0", "--optimizer=adamw"],
        [*TINY, "--device=meta", *RATE_WORDS, "--no-swap"],
        [*TINY, "--device=meta", *RATE_WORDS, "--optimizer=sgd"],
        ["--model=my_models:branching", "--runs=1", "--warmup=0"],
    ],
)
def test_the_command_tells_whether_a_model_fits(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "my_models", sys.modules[__name__])
    saved = tmp_path / "trace.json"
    assert main(["plan", *words, "--limit=1GiB", f"--save-trace={saved}"]) == 0
    shown = capsys.readouterr().out
    assert "fits: a step takes" in shown
    least_bytes = int(shown.partition("the least limit is ")[2].split()[0])
    wishes = [word for word in words if word.startswith("--no-")]
    assert main(["plan", str(saved), f"--limit={least_bytes}", *wishes]) == 0
    assert main(["plan", str(saved), f"--limit={least_bytes - 1}", *wishes]) == 1
    assert f"at least {least_bytes} bytes" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["--limit=1GiB"], 2, "expected a trace's file or --model"),
        (["trace.json", "--model=gpt", "--limit=1GiB"], 2, "expected a trace's file or --model"),
        ([*TINY, "--limit=1GiB", "--tflops=1"], 2, "found no --memory-gb-per-s and no --link-gb-per-s"),
        ([*TINY, "--limit=1GiB", "--device=meta"], 1, "on the meta device"),
        ([*TINY, "--limit=1B", *RATE_WORDS], 1, "expected a limit of at least"),
    ],
)
def test_wrong_words_are_told(words: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        found = main(["plan", *words])
    except SystemExit as ended:
        found = int(ended.code or 0)
    assert found == status
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("plan_or_trace", [partial(torch_lms.fit, limit="1GiB"), trace_step])
def test_another_config_is_refused(plan_or_trace: Callable[..., object]) -> None:
    with pytest.raises(ProfileError, match="expected a FitConfig as config, found ProfileConfig; a ProfileConfig goes"):
        plan_or_trace(nn.Linear(2, 2), torch.ones(2, 2), config=ProfileConfig())
