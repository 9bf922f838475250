"""README's snippet: a Trainer of transformers within a limit that its training presses on."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

import torch_lms
from tests.unit.markers import counts_exactly
from tests.unit.trainings import one_thread

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from docs.examples import trainer as trainer_example  # noqa: E402  # it imports transformers

pytestmark = pytest.mark.slow

STEPS = 12


def losses(folder: Path) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    class Noting(transformers.Trainer):  # type: ignore[misc]
        def training_step(self, *given: object) -> torch.Tensor:
            loss: torch.Tensor = super().training_step(*given)
            found.append(loss.clone())
            return loss

    quiet = {"eval_strategy": "no", "save_strategy": "no", "logging_strategy": "no", "use_cpu": True}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=16, report_to="none", **quiet
    )
    transformers.set_seed(0)
    trainer = Noting(
        trainer_example.make_model(), arguments, train_dataset=trainer_example.RandomTokens(sequences=64, length=64)
    )
    trainer.train()
    return found


@counts_exactly
@one_thread()
def test_a_trainer_within_half_of_its_memory_has_the_same_losses(tmp_path: Path) -> None:
    gc.collect()
    torch_lms.swap.count_cpu_allocations()
    before = torch_lms.stats(reset=True).allocated_bytes
    expected = losses(tmp_path / "plain")
    needed_bytes = torch_lms.stats().peak_allocated_bytes - before
    torch_lms.enable({"cpu": before + needed_bytes // 2}, min_bytes=4096)
    torch_lms.stats(reset=True)
    found = losses(tmp_path / "limited")
    stats = torch_lms.stats()
    assert len(found) == STEPS
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert stats.peak_allocated_bytes <= stats.limit_bytes
    assert stats.pageouts > 0
