"""DeepSpeed's ZeRO-Offload as a peer; nothing else here needs DeepSpeed."""

from __future__ import annotations

import os
from functools import partial

import deepspeed
import torch
import torch.distributed as dist

from benchmarks.workloads import Program

__all__ = ["ZeroOffload"]


class ZeroOffload:
    """ZeRO-2 with its optimizer offloaded: gradients go to the host, where DeepSpeed's own AdamW updates.

    Settings are those of DeepSpeed's tutorial on ZeRO-Offload. `torch.distributed` is initialized.

    Args:
        program: whose model becomes a 16-bit one, and whose loss gets DeepSpeed's backward.
        learning_rate: of AdamW.
    """

    def __init__(self, program: Program, learning_rate: float) -> None:
        for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
            os.environ.setdefault(name, value)
        self.engine = deepspeed.initialize(
            model=program.model,
            model_parameters=program.model.parameters(),
            dist_init_required=not dist.is_initialized(),
            config={
                "train_micro_batch_size_per_gpu": program.samples,
                "bf16": {"enabled": True},
                "optimizer": {"type": "AdamW", "params": {"lr": learning_rate, "weight_decay": 0.01}},
                "zero_optimization": {
                    "stage": 2,
                    "offload_optimizer": {"device": "cpu", "pin_memory": True},
                    "contiguous_gradients": True,
                    "overlap_comm": True,
                },
            },
        )[0]
        self.plain_loss = program.loss
        program.loss = self.loss

    def loss(self) -> torch.Tensor:
        """One forward; the loss's `backward` is the engine's, which gathers gradients."""
        loss = self.plain_loss()
        loss.backward = partial(self.engine.backward, loss)  # type: ignore[method-assign]
        return loss

    def step(self) -> None:
        """The host's step, and the parameters back to the device."""
        self.engine.step()
