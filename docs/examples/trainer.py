"""A small Llama, trained by the Trainer of Hugging Face transformers with its model data in chunks.

The lines marked `# torch_lms` are all that differs from the program without: there, `train` makes the same optimizer.
Trainer has moved the model to its device by then. With an optimizer of your own, `Trainer(optimizers=(yours, None))`,
`create_optimizer` returns that one. Leave `bf16` and `fp16` off: the parameters are bf16, and their masters fp32.

    python docs/examples/trainer.py
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import torch_lms  # torch_lms


class RandomTokens(Dataset[dict[str, torch.Tensor]]):
    """Sequences of random tokens, which the model is to learn by heart."""

    def __init__(self, sequences: int = 32, length: int = 32, tokens: int = 128) -> None:
        self.ids = torch.randint(tokens, (sequences, length), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        """Sequences."""
        return len(self.ids)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        """One of them."""
        return {"input_ids": self.ids[number], "labels": self.ids[number]}


def make_model() -> LlamaForCausalLM:
    """With 32-bit parameters, as the masters are to be; the output layer is the embedding."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            tie_word_embeddings=True,
            dtype=torch.float32,
        )
    )


def main(output: str | Path, kind: type[Trainer] = Trainer, resume: str | bool = False, **given: Any) -> Trainer:
    """Trains, and returns the Trainer; with `resume`, from a checkpoint, or from the last one in `output`."""
    settings: dict[str, Any] = {"max_steps": 40, "logging_steps": 5, "save_steps": 20}
    settings |= {"eval_strategy": "steps", "eval_steps": 20, "report_to": "none", "disable_tqdm": True}
    settings |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    settings |= {"learning_rate": 3e-3, "max_grad_norm": 1.0}
    arguments = TrainingArguments(output_dir=str(output), **(settings | given))
    set_seed(arguments.seed)
    model, data = make_model(), RandomTokens()
    trainer = kind(model, arguments, train_dataset=data, eval_dataset=data)
    model, trainer.optimizer = torch_lms.chunked(model, trainer.create_optimizer(), device_limit="1GiB")  # torch_lms
    trainer.train(resume_from_checkpoint=resume)
    return trainer


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        for entry in main(folder).state.log_history:
            print({name: entry[name] for name in ("step", "loss", "eval_loss", "grad_norm") if name in entry})
