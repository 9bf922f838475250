"""Trainers of other projects train models in chunks, with the losses of a loop by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_lms
from tests.chunk.plain import Chunked, Plain
from tests.unit.trainings import MIN_BYTES, one_thread

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from docs.examples import trainer as trainer_example  # noqa: E402  # it imports transformers

pytestmark = pytest.mark.slow

STEPS = 6
LEARNING_RATE = 3e-3

Losses = list[torch.Tensor]
Batch = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _with_one_thread() -> Iterator[None]:
    with one_thread():
        yield


class Noting(transformers.Trainer):  # type: ignore[misc]
    """Notes what it trains with, and what its losses are."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.batches: list[Batch] = []
        self.losses: Losses = []

    def training_step(self, model: nn.Module, inputs: Batch, *given: Any) -> torch.Tensor:
        self.batches.append({name: value.clone() for name, value in inputs.items()})
        loss: torch.Tensor = super().training_step(model, inputs, *given)
        self.losses.append(loss)
        return loss


def train(folder: Path, kind: type[Noting] = Noting, **given: Any) -> Noting:
    quiet = {"eval_strategy": "no", "save_strategy": "no", "logging_strategy": "no", "optim": "adamw_torch"}
    made = trainer_example.main(folder, kind, **({"use_cpu": True, "max_steps": STEPS} | quiet | given))
    assert isinstance(made, Noting)
    return made


def optimize(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0)


def train_by_hand(
    training: Plain | Chunked,
    losses_of: Sequence[Sequence[Callable[[], torch.Tensor]]],
    factor: Callable[[int], float],
    max_norm: float,
) -> Losses:
    """Steps of several losses each."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(training.optimizer, factor)
    found = []
    for several in losses_of:
        for loss_of in several:
            loss = loss_of()
            loss.backward()
            found.append(loss.detach())
        if max_norm:
            nn.utils.clip_grad_norm_(training.model.parameters(), max_norm)
        training.step()
        scheduler.step()
        training.zero_grad()
    return found


def groups_of(every: Sequence[Any], count: int) -> list[Sequence[Any]]:
    return [every[start:end] for start, end in pairwise(range(0, len(every) + 1, count))]


def same(some: Losses, others: Losses) -> bool:
    return len(some) == len(others) > 0 and all(map(torch.equal, some, others))


def same_state(model: nn.Module, other: nn.Module) -> bool:
    state, expected = model.state_dict(), other.state_dict()
    return list(state) == list(expected) and all(torch.equal(state[name], expected[name]) for name in state)


# --- transformers ---


def test_the_example_with_transformers_runs_and_learns(tmp_path: Path) -> None:
    trained = trainer_example.main(tmp_path, use_cpu=True, max_steps=10, logging_steps=1, save_steps=5, eval_steps=5)
    losses = [entry["loss"] for entry in trained.state.log_history if "loss" in entry]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    assert isinstance(trained.optimizer.optimizer, torch_lms.chunk.optimizer.ChunkedOptimizer)
    assert next(trained.model.parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", [Chunked, Plain])
@pytest.mark.parametrize("max_norm", [0.0, 0.1], ids=["no clipping", "clipping"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_losses_of_transformers_are_those_of_a_loop_by_hand(
    kind: type[Plain] | type[Chunked], max_norm: float, accumulate: int, tmp_path: Path
) -> None:
    made = train(tmp_path, max_grad_norm=max_norm, gradient_accumulation_steps=accumulate)
    transformers.set_seed(made.args.seed)
    expected = kind(trainer_example.make_model(), optimize)

    def loss_of(batch: Batch, count: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = expected.model(**batch, num_items_in_batch=count).loss
        return loss

    steps = []
    for batches in groups_of(made.batches, accumulate):
        count = torch.stack([batch["labels"][:, 1:].ne(-100).sum() for batch in batches]).sum()
        steps.append([partial(loss_of, batch, count) for batch in batches])
    losses = train_by_hand(expected, steps, lambda step: 1 - step / STEPS, max_norm)
    assert len(losses) == STEPS * accumulate
    assert same(made.losses, losses)
    if isinstance(expected, Chunked):
        assert same_state(made.model, expected.model)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "adafactor", "sgd"])
def test_a_run_of_transformers_that_is_resumed_goes_on_as_if_it_had_not_ended(optim: str, tmp_path: Path) -> None:
    through = train(tmp_path, save_strategy="steps", save_steps=STEPS // 2, optim=optim)
    checkpoint = tmp_path / f"checkpoint-{STEPS // 2}"
    resumed = train(tmp_path / "other", resume=str(checkpoint), optim=optim)
    assert same(resumed.losses, through.losses[len(through.losses) // 2 :])
    assert same_state(resumed.model, through.model)


def test_checkpoints_of_transformers_are_of_the_masters_with_tied_weights_once(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    made = train(tmp_path, save_strategy="steps", save_steps=STEPS)
    folder = tmp_path / f"checkpoint-{STEPS}"
    saved, state = safetensors.load_file(folder / "model.safetensors"), made.model.state_dict()
    assert set(state) - set(saved) == {"lm_head.weight"}
    for name, value in saved.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, state[name])
    again = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert same_state(again, made.model)


class Evaluating(Noting):
    """Evaluates after each backward: before the step, and between backwards of one step."""

    def training_step(self, model: nn.Module, inputs: Batch, *given: Any) -> torch.Tensor:
        loss = super().training_step(model, inputs, *given)
        self.evaluate()
        return loss


@pytest.mark.parametrize("accumulate", [1, 2])
def test_evaluation_by_transformers_changes_no_loss(accumulate: int, tmp_path: Path) -> None:
    expected = train(tmp_path, gradient_accumulation_steps=accumulate)
    between = train(tmp_path, Evaluating, gradient_accumulation_steps=accumulate)
    after = train(tmp_path, gradient_accumulation_steps=accumulate, eval_strategy="steps", eval_steps=1)
    for made in (between, after):
        assert same(made.losses, expected.losses)
        assert same_state(made.model, expected.model)


@pytest.mark.parametrize(
    "setting",
    [{"gradient_checkpointing": True}, {"bf16": True}, {"dataloader_num_workers": 1}, {"auto_find_batch_size": True}],
    ids=lambda one: next(iter(one)),
)
def test_settings_of_transformers_that_change_no_loss_change_none(setting: dict[str, Any], tmp_path: Path) -> None:
    assert same(train(tmp_path, **setting).losses, train(tmp_path).losses)


class WithItsOwnOptimizer(Noting):
    """Is given the optimizer."""

    def __init__(self, model: nn.Module, *given: Any, **named: Any) -> None:
        super().__init__(model, *given, optimizers=(optimize(model.parameters()), None), **named)


def test_an_optimizer_that_transformers_is_given_trains_as_its_own_does(tmp_path: Path) -> None:
    assert same(train(tmp_path, WithItsOwnOptimizer).losses, train(tmp_path).losses)


def test_accelerate_saves_every_weight(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    made = train(tmp_path)
    made.accelerator.save_model(made.model, tmp_path)
    saved = safetensors.load_file(tmp_path / "model.safetensors")
    assert set(made.model.state_dict()) - set(saved) <= {"lm_head.weight"}


def test_losses_of_transformers_under_a_limit_that_pages_are_the_same(
    paged: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = train(tmp_path)
    chunked = torch_lms.chunked

    def in_small_chunks(model: Any, optimizer: Any, device_limit: str) -> Any:
        torch_lms.swap.count_cpu_allocations()
        limit_bytes = torch_lms.stats().allocated_bytes + (512 << 10)
        paged.enable({"cpu": limit_bytes}, min_bytes=MIN_BYTES)
        return chunked(model, optimizer, chunk_numel=1 << 14)

    monkeypatch.setattr(torch_lms, "chunked", in_small_chunks)
    limited = train(tmp_path)
    assert same(limited.losses, expected.losses)
    assert torch_lms.stats().pageouts > 0


# --- Lightning ---


@pytest.fixture
def lightning() -> Any:
    """The example; its functions train."""
    pytest.importorskip("lightning.pytorch")
    from docs.examples import lightning_module

    return lightning_module


def fit(lightning: Any, folder: Path, *given: Any, **named: Any) -> Any:
    settings = {"accelerator": "cpu", "max_epochs": 2, "limit_train_batches": 4, "limit_val_batches": 0}
    model, _ = lightning.main(folder, *given, **({"enable_checkpointing": False} | settings | named))
    return model


def test_the_example_with_lightning_runs_and_learns(lightning: Any, tmp_path: Path) -> None:
    model, made_by = lightning.main(tmp_path, accelerator="cpu", max_epochs=2)
    assert len(model.losses) == 16
    assert model.losses[8] < model.losses[0]
    assert made_by.callback_metrics["validation_loss"] < model.losses[0]
    assert next(model.parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", [Chunked, Plain])
@pytest.mark.parametrize("max_norm", [0.0, 0.1], ids=["no clipping", "clipping"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_losses_of_lightning_are_those_of_a_loop_by_hand(
    lightning: Any, kind: type[Plain] | type[Chunked], max_norm: float, accumulate: int, tmp_path: Path
) -> None:
    made = fit(lightning, tmp_path, accumulate_grad_batches=accumulate, gradient_clip_val=max_norm)
    lightning.seed_everything(0)
    batches = torch.randint(128, (32, 32)).split(4)[:4] * 2
    expected = kind(lightning.Llama(), lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE))

    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = expected.model.model(input_ids=ids, labels=ids).loss
        return loss / accumulate

    steps = [[partial(loss_of, ids) for ids in several] for several in groups_of(batches, accumulate)]
    losses = train_by_hand(expected, steps, lambda step: 0.9 ** (step * accumulate // 4), max_norm)
    assert [loss.item() * accumulate for loss in losses] == made.losses
    if isinstance(expected, Chunked):
        assert same_state(made, expected.model)


def test_a_run_of_lightning_that_is_resumed_goes_on_as_if_it_had_not_ended(lightning: Any, tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    saving = {"enable_checkpointing": True, "max_epochs": 3}
    keep = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    through = fit(lightning, tmp_path, callbacks=[keep], **saving)
    resumed = fit(lightning, tmp_path / "other", tmp_path / "epoch=0.ckpt", **saving)
    assert len(resumed.losses) == 8
    assert resumed.losses == through.losses[4:]
    assert same_state(resumed, through)


def test_checkpoints_of_lightning_are_of_the_masters(lightning: Any, tmp_path: Path) -> None:
    made = fit(lightning, tmp_path, enable_checkpointing=True)
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    saved = torch.load(checkpoint)["state_dict"]
    assert all(value.dtype == torch.float32 for value in saved.values())
    assert any(not torch.equal(value, value.bfloat16().float()) for value in saved.values())
    assert same_state(lightning.Llama.load_from_checkpoint(checkpoint), made)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_evaluation_by_lightning_changes_no_loss(lightning: Any, accumulate: int, tmp_path: Path) -> None:
    expected = fit(lightning, tmp_path, accumulate_grad_batches=accumulate)
    evaluated = fit(lightning, tmp_path, accumulate_grad_batches=accumulate, limit_val_batches=2, val_check_interval=1)
    assert evaluated.losses == expected.losses
    assert same_state(evaluated, expected)
