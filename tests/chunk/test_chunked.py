"""Trainings in chunks are bit-equal to mixed precision by hand, whatever moves and however parameters are used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # PyTorch's own name for it
from torch.utils.checkpoint import checkpoint

import torch_lms
from tests.chunk.plain import Chunked, Plain, loss_of, same, train
from tests.unit.trainings import GPT_TRAINING, MIN_BYTES, TRAININGS, Batch, Training, one_thread, vector_batch
from torch_lms.chunk import streamed_updates
from torch_lms.chunk.states import TensorState

STEPS = 4

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-2),
    "fused AdamW": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "foreach Adam": partial(torch.optim.Adam, lr=1e-2, amsgrad=True, foreach=True),
    "SGD": partial(torch.optim.SGD, lr=1e-2),
    "SGD with momentum": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.9, centered=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "NAdam": partial(torch.optim.NAdam, lr=1e-3),
    "Adafactor": partial(torch.optim.Adafactor, lr=1e-2),
}
ADAMW = OPTIMIZERS["AdamW"]


def make(training: Training) -> nn.Module:
    torch.manual_seed(0)
    return training.make()


def expect_equal(
    model: Callable[[], nn.Module],
    batch: Callable[[int], Batch],
    optimize: Callable[..., torch.optim.Optimizer] = ADAMW,
    loss: Callable[..., torch.Tensor] = loss_of,
    **options: Any,
) -> Chunked:
    expected = list(train(Plain(model(), optimize), batch, STEPS, loss))
    chunked = Chunked(model(), optimize, **options)
    for number, made in enumerate(train(chunked, batch, STEPS, loss)):
        assert same(made, expected[number]), f"step {number}"
    return chunked


@one_thread()
@pytest.mark.parametrize("training", TRAININGS, ids=lambda one: one.name)
def test_training_is_bit_equal(training: Training) -> None:
    expect_equal(lambda: make(training), training.batch)


@one_thread()
@pytest.mark.parametrize("training", TRAININGS, ids=lambda one: one.name)
@pytest.mark.parametrize("reuse", [True, False], ids=["reuse", "apart"])
def test_training_under_a_limit_is_bit_equal(training: Training, reuse: bool, paged: Any) -> None:
    torch_lms.swap.count_cpu_allocations()
    held_bytes = torch_lms.stats().allocated_bytes
    paged.enable({"cpu": held_bytes + training.limit_bytes}, min_bytes=MIN_BYTES)
    expect_equal(lambda: make(training), training.batch, reuse_gradients=reuse, chunk_numel=1 << 18)
    assert torch_lms.stats().pageouts > 0


@pytest.fixture(autouse=True)
def _small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tensors are cut, and buffers take turns."""
    monkeypatch.setattr(streamed_updates, "_PORTION_NUMEL", 1 << 11)


@one_thread()
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("update_on", ["device", "stream"])
def test_every_optimizer_is_bit_equal(optimizer: str, update_on: str) -> None:
    batch, optimize = GPT_TRAINING.batch, OPTIMIZERS[optimizer]
    expect_equal(lambda: make(GPT_TRAINING), batch, optimize, chunk_numel=1 << 15, update_on=update_on)


@one_thread()
@pytest.mark.parametrize("training", TRAININGS, ids=lambda one: one.name)
@pytest.mark.parametrize("reuse", [True, False], ids=["reuse", "apart"])
@pytest.mark.parametrize("update_on", ["host", "stream"])
def test_updates_of_what_is_on_the_host_are_bit_equal(training: Training, reuse: bool, update_on: str) -> None:
    options = {"reuse_gradients": reuse, "update_on": update_on, "chunk_numel": 1 << 18}
    expect_equal(lambda: make(training), training.batch, **options)


@one_thread()
@pytest.mark.parametrize("update_on", ["host", "stream"])
@pytest.mark.parametrize("loss", ["accumulation", "evaluation between", "clipping", "two graphs"])
def test_whatever_uses_parameters_is_bit_equal_with_updates_elsewhere(loss: str, update_on: str) -> None:
    expect_equal(lambda: Owner(in_order), vector_batch, loss=LOSSES[loss], update_on=update_on)


class Owner(nn.Module):
    """A model whose parts are used as `run` says."""

    def __init__(self, run: Callable[[Owner, torch.Tensor], torch.Tensor], parts: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(512, 512) for _ in range(parts))
        self.scale = nn.Parameter(torch.ones(512))
        self.spare = nn.Parameter(torch.randn(512))
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x)


def in_order(self: Owner, x: torch.Tensor) -> torch.Tensor:
    for part in self.parts:
        x = F.gelu(part(x))
    return x * self.scale


def checkpointed(self: Owner, x: torch.Tensor, *, reentrant: bool) -> torch.Tensor:
    for part in [*self.parts, self.parts[0]]:  # one of them is shared
        x = checkpoint(lambda y, part=part: F.gelu(part(y)), x, use_reentrant=reentrant)
    return x * self.scale


def functional(self: Owner, x: torch.Tensor) -> torch.Tensor:
    for part in self.parts:
        x = F.gelu(F.linear(x, part.weight, part.bias))
    return x * self.scale


def sharing(self: Owner, x: torch.Tensor) -> torch.Tensor:
    return in_order(self, in_order(self, x))


def using_one_late(self: Owner, x: torch.Tensor) -> torch.Tensor:
    return in_order(self, x) + (self.spare * self.parts[0].weight).sum(0)


RUNS: dict[str, Callable[[Owner, torch.Tensor], torch.Tensor]] = {
    "in order": in_order,
    "reentrant checkpoints": partial(checkpointed, reentrant=True),
    "checkpoints": partial(checkpointed, reentrant=False),
    "functional": functional,
    "shared": sharing,
    "late": using_one_late,
}


def accumulated(model: nn.Module, batch: Batch) -> torch.Tensor:
    loss_of(model, batch).backward()
    return loss_of(model, (batch[0] * 0.5, batch[1]))


def evaluated(model: nn.Module, batch: Batch) -> torch.Tensor:
    loss_of(model, batch).backward()
    with torch.no_grad():
        loss = loss_of(model, batch)
    return loss.requires_grad_() * 1


def backward_twice(model: nn.Module, batch: Batch) -> torch.Tensor:
    loss = loss_of(model, batch)
    loss.backward(retain_graph=True)
    return loss * 2


def two_graphs(model: nn.Module, batch: Batch) -> torch.Tensor:
    first, second = loss_of(model, batch), loss_of(model, (batch[0] + 1, batch[1]))
    first.backward()
    return second


def penalized(model: nn.Module, batch: Batch) -> torch.Tensor:
    x = batch[0].bfloat16().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).float().square().sum(), x, create_graph=True)
    return gradient.float().square().mean()


def clipped(model: nn.Module, batch: Batch) -> torch.Tensor:
    loss_of(model, batch).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    return torch.zeros((), requires_grad=True) * 1


LOSSES = {
    "accumulation": accumulated,
    "evaluation between": evaluated,
    "retained graph": backward_twice,
    "two graphs": two_graphs,
    "double backward": penalized,
    "clipping": clipped,
}


@one_thread()
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("loss", ["plain", *LOSSES])
def test_whatever_uses_parameters_is_bit_equal(run: str, loss: str) -> None:
    if (run, loss) == ("reentrant checkpoints", "double backward"):
        pytest.skip("PyTorch refuses gradients of inputs there")
    expect_equal(lambda: Owner(RUNS[run]), vector_batch, loss=LOSSES.get(loss, loss_of), chunk_numel=1 << 19)


@one_thread()
def test_frozen_parameters_and_adapters_on_them() -> None:
    def model() -> nn.Module:
        found = Owner(in_order)
        for part in found.parts[:3]:
            part.requires_grad_(False)
        return found

    def optimize(parameters: Iterator[torch.Tensor]) -> torch.optim.Optimizer:
        return ADAMW([one for one in parameters if one.requires_grad])

    plain = Plain(model(), optimize)
    chunked = Chunked(model(), optimize)
    for expected, made in zip(train(plain, vector_batch, STEPS), train(chunked, vector_batch, STEPS), strict=True):
        assert torch.equal(made[0], expected[0])
    frozen = chunked.model.parts[0].weight
    assert frozen.dtype == torch.bfloat16
    assert chunked.optimizer._data.allocated_bytes()["masters"] < 4 * 512 * 512 * 2


@one_thread()
def test_groups_and_schedulers_of_either_optimizer() -> None:
    def optimize(parameters: Iterator[torch.Tensor]) -> torch.optim.Optimizer:
        every = list(parameters)
        return torch.optim.AdamW(
            [{"params": every[::2], "weight_decay": 0.1}, {"params": every[1::2], "weight_decay": 0.0}], lr=1e-2
        )

    for of_given in (False, True):
        plain = Plain(Owner(in_order), optimize)
        model = Owner(in_order)
        given = optimize(model.parameters())
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(plain.optimizer, 0.5)]
        before = [torch.optim.lr_scheduler.ExponentialLR(given, 0.5)] if of_given else []
        chunked = Chunked(model, lambda _, given=given: given)
        schedulers += before or [torch.optim.lr_scheduler.ExponentialLR(chunked.optimizer, 0.5)]
        for expected, made in zip(train(plain, vector_batch, STEPS), train(chunked, vector_batch, STEPS), strict=True):
            assert same(made, expected)
            for scheduler in schedulers:
                scheduler.step()
        assert chunked.optimizer.param_groups[0]["lr"] == plain.optimizer.param_groups[0]["lr"] == 1e-2 / 2**STEPS


@one_thread()
@pytest.mark.parametrize("update_on", ["device", "host", "stream"])
def test_scaled_losses_and_skipped_steps(update_on: str) -> None:
    chunked = Chunked(Owner(in_order), ADAMW, dtype=torch.float16, update_on=update_on)
    plain = Plain(Owner(in_order), ADAMW, dtype=torch.float16)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
    scale, skipped = 2.0**20, 0
    for number in range(8):
        for training in (plain, chunked):
            training.zero_grad()
        scaler.scale(loss_of(chunked.model, vector_batch(number), torch.float16)).backward()
        (loss_of(plain.model, vector_batch(number), torch.float16) * scale).backward()
        for one, other in zip(chunked.parameters, plain.parameters, strict=True):
            assert one.grad is None if other.grad is None else torch.equal(bits(one.grad), bits(other.grad))
        scaler.step(chunked.optimizer)
        if all(one.grad.isfinite().all() for one in plain.parameters if one.grad is not None):
            step_unscaled(plain, scale)
        else:
            skipped += 1
        scaler.update()
        scale = scaler.get_scale()
        for master, expected in zip(chunked.masters, plain.masters, strict=True):
            assert torch.equal(master, expected)
    assert 0 < skipped < 8


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int16)


@torch.no_grad()
def step_unscaled(plain: Plain, scale: float) -> None:
    for master, parameter in zip(plain.masters, plain.parameters, strict=True):
        master.grad = None if parameter.grad is None else parameter.grad.float().div_(scale)
    plain.optimizer.step()
    for master, parameter in zip(plain.masters, plain.parameters, strict=True):
        parameter.copy_(master)


@one_thread()
def test_what_the_program_writes_to_parameters_stays() -> None:
    def surgery(training: Plain | Chunked) -> None:
        with torch.no_grad():
            training.parameters[0].mul_(0.5)
            training.parameters[2].data = torch.full_like(training.parameters[2], 0.25)
        if isinstance(training, Plain):
            with torch.no_grad():
                for number in (0, 2):
                    master, written = training.masters[number], training.parameters[number]
                    master.copy_(torch.where(written == master.bfloat16(), master, written.float()))

    plain, chunked = Plain(Owner(in_order), ADAMW), Chunked(Owner(in_order), ADAMW)
    steps = [train(training, vector_batch, STEPS) for training in (plain, chunked)]
    for expected, made in zip(*steps, strict=True):
        assert same(made, expected)
        surgery(plain)
        surgery(chunked)


@one_thread()
def test_an_exception_anywhere_leaves_everything_usable() -> None:
    def failing(self: Owner, x: torch.Tensor) -> torch.Tensor:
        if fail == "forward":
            self.parts[0](x)
            raise RuntimeError("as asked")
        x = in_order(self, x)
        if fail == "backward":
            x.register_hook(raise_as_asked)
            self.parts[2].weight.register_hook(raise_as_asked)
        return x

    def raise_as_asked(_: torch.Tensor) -> None:
        if fail:
            raise RuntimeError("as asked")

    fail = ""
    plain, chunked = Plain(Owner(failing), ADAMW), Chunked(Owner(failing), ADAMW, chunk_numel=1 << 19)
    for number in range(6):
        fail = ("", "forward", "backward")[number % 3]
        for training in (plain, chunked):
            training.zero_grad()
            if fail:
                with pytest.raises(RuntimeError, match="as asked"):
                    loss_of(training.model, vector_batch(number)).backward()
                training.zero_grad()
            fail_before, fail = fail, ""
            loss_of(training.model, vector_batch(number)).backward()
            training.step()
            fail = fail_before
        for master, expected in zip(chunked.masters, plain.masters, strict=True):
            assert torch.equal(master, expected)


class Failing(torch.optim.AdamW):
    """Fails once, at its third tensor."""

    left = 3

    def _init_group(self, group: Any, *lists: Any) -> Any:
        Failing.left -= len(group["params"])
        if Failing.left == 0:
            raise RuntimeError("as asked")
        return super()._init_group(group, *lists)


@one_thread()
@pytest.mark.parametrize("update_on", ["device", "host", "stream"])
def test_an_optimizer_that_fails_can_step_again(update_on: str) -> None:
    plain = Plain(Owner(in_order), ADAMW)
    chunked = Chunked(Owner(in_order), partial(Failing, lr=1e-2), update_on=update_on, chunk_numel=1 << 18)
    for number in range(3):
        Failing.left = 3 if number == 1 else -100
        for training in (plain, chunked):
            training.zero_grad()
            loss_of(training.model, vector_batch(number)).backward()
        plain.step()
        if number == 1:
            with pytest.raises(RuntimeError, match="as asked"):
                chunked.step()
            assert any(one.grad is not None for one in chunked.parameters)
        chunked.step()
        for master, expected in zip(chunked.masters, plain.masters, strict=True):
            assert torch.equal(master, expected)


# --- what is not supported says so ---


@one_thread()
def test_who_asks_for_a_parameter_whose_bytes_are_a_gradient_is_told() -> None:
    chunked = Chunked(Owner(in_order), ADAMW)
    loss_of(chunked.model, vector_batch(0)).backward()
    weight = chunked.model.parts[1].weight
    number = chunked.optimizer._data.numbers[weight]
    assert chunked.optimizer._occupancy.states[number] is TensorState.HOLD_AFTER_BWD
    assert weight.shape == (512, 512)
    asked = (lambda: weight + 1, weight.data_ptr, weight.detach().tolist, lambda: weight[0] * 2, weight.t().contiguous)
    for ask in (*asked, lambda: repr(weight), lambda: weight[0, 0].item(), lambda: weight.detach().view(-1).zero_()):
        with pytest.raises(RuntimeError, match=r"parts.1.weight to be used before its backward.*call optimizer.step"):
            ask()
    chunked.step()
    assert (weight + 1).isfinite().all()


@one_thread()
def test_another_graph_that_needs_a_parameter_is_refused_by_autograd() -> None:
    chunked = Chunked(Owner(in_order), ADAMW)
    model = chunked.model
    x = torch.randn(4, 512).bfloat16().requires_grad_()
    first, second = model.parts[0](x), F.linear(x, model.parts[0].weight)
    first.float().sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.float().sum().backward()


def storages_of(model: nn.Module) -> list[Any]:
    """Which storages the parameters are views of; their addresses change where they are paged."""
    return [(one.dtype, one.untyped_storage()._cdata) for one in model.parameters() if one.device.type == "cpu"]


def test_what_cannot_be_in_chunks_is_refused_before_anything_changes() -> None:
    def refused(model: nn.Module, text: str, optimize: Any = ADAMW, **options: Any) -> None:
        before = storages_of(model)
        optimizer = optimize(model.parameters()) if callable(optimize) else optimize
        with pytest.raises(torch_lms.errors.ChunkError, match=text):
            torch_lms.chunked(model, optimizer, **options)
        assert before == storages_of(model)

    linear = nn.Linear(8, 8)
    refused(linear, "expected dtype to be", dtype=torch.float64)
    refused(linear, "expected update_on to be 'auto', 'device', 'host' or 'stream', found 'disk'", update_on="disk")
    refused(linear, "found LBFGS", torch.optim.LBFGS)
    refused(linear, "expected an optimizer of the model's parameters, found NoneType", None)
    with torch.inference_mode():
        refused(linear, "found torch.inference_mode on")
    refused(linear, "found 2 others", ADAMW(nn.Linear(3, 3).parameters()))
    refused(linear, "expected chunks of at least 128 elements", chunk_numel=64)
    refused(linear, "expected chunks of at least 128 elements", chunk_numel=0)
    refused(linear, "expected chunk_numel to be a number of elements, found '1M'", chunk_numel="1M")
    refused(linear, r"order of the model's own parameters, found 1 others \(5\)", order=5)
    refused(linear, r"found 2 others \(one of shape \(2,\), 'bias'\)", order=[nn.Parameter(torch.ones(2)), "bias"])
    refused(nn.Linear(8, 8, dtype=torch.float64), "of torch.float64")
    refused(nn.Linear(8, 8, device="meta"), "expected device= for a model on the meta device")
    refused(nn.Embedding(8, 8, sparse=True), "sparse=True", torch.optim.SparseAdam)
    with pytest.raises(torch_lms.errors.ChunkError, match="expected parameters with sizes, found weight without"):
        torch_lms.chunked(lazy := nn.LazyLinear(8), ADAMW(lazy.parameters()))
    linear(torch.randn(2, 8)).sum().backward()
    refused(linear, "expected no gradients yet")
    model = nn.Linear(8, 8)
    model, optimizer = torch_lms.chunked(model, ADAMW(model.parameters()))
    with pytest.raises(torch_lms.errors.ChunkError, match="groups to be complete"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    refused(model, "not in chunks yet", optimizer)
