"""What a user would pick instead of a limit: other ways to need less memory, each as a change to a program."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.workloads import Program

__all__ = [
    "KEPT_BY_SELECTION",
    "checkpoint_all",
    "checkpoint_blocks",
    "checkpoint_selectively",
    "compile_with_budget",
    "offload_with_trl",
    "save_on_cpu",
]

aten = torch.ops.aten
_ATTENTION = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
)
_MATMULS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
# What each selective checkpoint keeps; of "half" every second matrix product, as in torchtitan.
KEPT_BY_SELECTION = ("matmuls", "half", "attention")


def checkpoint_blocks(program: Program, *, every: int = 1) -> None:
    """Checkpoints the first of each so many blocks."""
    for block in program.blocks[::every]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def checkpoint_all(program: Program) -> None:
    """Full checkpointing as the model offers it, or else of every block."""
    enable = getattr(program.model, "gradient_checkpointing_enable", None)
    if enable is None:
        checkpoint_blocks(program)
    else:
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def checkpoint_selectively(program: Program, *, keep: str) -> None:
    """Checkpoints every block, but for what is dear to compute again.

    Args:
        program: to change.
        keep: one of `KEPT_BY_SELECTION`.
    """
    contexts = partial(_selective_contexts, keep)
    for block in program.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)


def _selective_contexts(keep: str) -> Any:
    return create_selective_checkpoint_contexts(_policy(keep))


def _policy(keep: str) -> Callable[..., CheckpointPolicy]:
    """What happens to an op's outputs; forward and the second forward count for themselves."""
    products = {True: 0, False: 0}

    def decide(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        kept = op in _ATTENTION
        if op in _MATMULS:
            products[context.is_recompute] += 1
            kept = keep == "matmuls" or (keep == "half" and products[context.is_recompute] % 2 == 1)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return decide


def compile_with_budget(program: Program, *, budget: float) -> None:
    """Compiles the model; the compiler recomputes what a share of the activations' memory leaves no room for."""
    import torch._functorch.config

    torch._functorch.config.activation_memory_budget = budget
    program.model.compile()


def save_on_cpu(program: Program) -> None:
    """PyTorch's own hook, with pinned memory."""
    program.scope = partial(torch.autograd.graph.save_on_cpu, pin_memory=True)


def offload_with_trl(program: Program) -> None:
    """TRL's `OffloadActivations`: one for all steps, as its trainer does it."""
    offload = _trl_offload()
    program.scope = lambda: offload


def _trl_offload() -> AbstractContextManager[Any]:
    """From TRL's released wheel; its one file is loaded by itself.

    Raises:
        ImportError: if TRL is not on the path.
    """
    from accelerate import PartialState

    PartialState()  # TRL's logger needs it
    for folder in sys.path:
        path = f"{folder}/trl/models/activation_offloading.py"
        spec = importlib.util.spec_from_file_location("trl_activation_offloading", path)
        try:
            module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
            spec.loader.exec_module(module)  # type: ignore[union-attr]
        except FileNotFoundError:
            continue
        offload: AbstractContextManager[Any] = module.OffloadActivations()
        return offload
    raise ImportError("expected the trl package on PYTHONPATH, found none; unpack its wheel there")
