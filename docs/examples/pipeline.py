"""A small Llama of transformers, as it is, cut into the stages of a pipeline and trained on all processes.

    torchrun --nproc-per-node 2 docs/examples/pipeline.py

Each process takes a GPU where there are enough of them, else all share the CPU.
"""

from __future__ import annotations

import os
from functools import partial

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import torch_lms.pipeline

STEPS = 10
VOCABULARY = 128
optimize = partial(torch.optim.AdamW, lr=3e-3)


def make_model() -> LlamaForCausalLM:
    """The same on every process; the output layer is the embedding."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            tie_word_embeddings=True,
            use_cache=False,
        )
    )


def batch(step: int) -> dict[str, torch.Tensor]:
    """Eight sequences that count upwards."""
    start = torch.arange(8).unsqueeze(1) + 8 * step
    ids = (start + torch.arange(32)) % VOCABULARY
    return {"input_ids": ids, "labels": ids}


def main() -> None:
    """Trains; the last process has the loss."""
    rank, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    on_gpus = gpus >= int(os.environ["LOCAL_WORLD_SIZE"])
    if on_gpus:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    with torch_lms.pipeline.train(make_model(), None, batch(0), microbatches=4, optimizer=optimize) as pipeline:
        for step in range(STEPS):
            loss = pipeline.step(**batch(step))
            if loss is not None:
                print(f"step {step + 1} of {STEPS}: loss {loss.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
