"""A small Llama, trained by Lightning's Trainer with its model data in chunks.

The lines marked `# torch_lms` are all that differs from the program without. Leave the Trainer's `precision` as it is:
the parameters become bf16, and the masters keep the 32 bits that the model was made with.

    python docs/examples/lightning_module.py
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import torch_lms  # torch_lms


class Llama(LightningModule):
    """A language model with its training; the output layer is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128}
        sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4}
        self.model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        """The loss of a batch."""
        loss: torch.Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        """Notes the loss of a batch."""
        self.log("validation_loss", self.model(input_ids=batch[0], labels=batch[0]).loss)

    def configure_optimizers(self) -> Any:
        """Lightning has moved the model to its device by now, and has loaded the checkpoint that it resumes from."""
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        _, optimizer = torch_lms.chunked(self, optimizer, device_limit="1GiB")  # torch_lms
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def main(output: str | Path, checkpoint: str | Path | None = None, **given: Any) -> tuple[Llama, Trainer]:
    """Trains, from a checkpoint on if there is one."""
    settings: dict[str, Any] = {"max_epochs": 10, "accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
    settings |= {"devices": 1, "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    seed_everything(0)
    data = TensorDataset(torch.randint(128, (32, 32)))
    trainer = Trainer(default_root_dir=output, **(settings | given))
    model = Llama()
    trainer.fit(model, DataLoader(data, 4), DataLoader(data, 4), ckpt_path=checkpoint)
    return model, trainer


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        trained, made_by = main(folder)
        for number, loss in enumerate(trained.losses[::8]):
            print(f"epoch {number}: {loss:.4f}")
        print(f"validation: {made_by.callback_metrics['validation_loss']:.4f}")
