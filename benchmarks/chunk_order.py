"""What the order of tensors in chunks does on two ranks: gathered bytes of a step, and chunks that are whole at a time.

    torchrun --nproc-per-node 2 -m benchmarks.chunk_order --output-dir /tmp/out

Tiny models on the CPU: none of these figures depends on a machine. XLM keeps its layers' parts in lists by kind, the
others keep layers together.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.chunked import in_chunks
from benchmarks.results import Result
from benchmarks.workloads import Program, hugging_face, make_program
from torch_lms.chunk import ChunkedOptimizer, order_of_use
from torch_lms.chunk.gathered import GatheredChunks

COLUMNS = [
    ("model", "Model", "{}"),
    ("order", "Order", "{}"),
    ("chunks", "Chunks", "{}"),
    ("gathered_chunks", "Gathered in a step", "{}"),
    ("gathered_share", "/ parameters' bytes", "{:.2f}"),
    ("most_whole", "Whole at a time", "{}"),
    ("whole_share", "/ parameters' bytes", "{:.2f}"),
]
_STEPS = 2  # the second knows what is used next


class Loss(nn.Module):
    """A program's loss as a call of a model, whose units are its model's."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.model = program.model
        self.loss = program.loss

    def forward(self) -> torch.Tensor:
        """The loss."""
        return self.loss()


@dataclass(slots=True)
class Counted:
    """Chunks of one step: how many were gathered, and the most that were whole at a time."""

    gathered: int = 0
    most_whole: int = 0


def xlm() -> Program:
    """XLM, in whose lists are attentions, norms and MLPs."""
    torch.manual_seed(0)
    words = {"vocab_size": 1000, "emb_dim": 64, "n_layers": 24, "n_heads": 4, "dropout": 0.0, "attention_dropout": 0.0}
    model = hugging_face("XLM WithLMHeadModel", {**words, "max_position_embeddings": 64})
    ids = torch.randint(1, 1000, (4, 32))
    return Program(model=model, loss=lambda: model(input_ids=ids, labels=ids).loss, blocks=[], samples=4, tokens=32)


MODELS: dict[str, Callable[[], Program]] = {
    "GPT": partial(make_program, "gpt", "cpu", tiny=True, changed={"layers": 24}),
    "T5": partial(make_program, "t5", "cpu", tiny=True, changed={"layers": 12}),
    "Whisper": partial(make_program, "whisper", "cpu", tiny=True, changed={"layers": 12}),
    "3D U-Net": partial(make_program, "unet3d", "cpu", tiny=True),
    "XLM": xlm,
}


@contextmanager
def counting() -> Iterator[Counted]:
    """Counts chunks that are gathered inside."""
    counted = Counted()
    begin = GatheredChunks.begin

    def begin_and_count(self: GatheredChunks, chunk: int, part: torch.Tensor) -> None:
        counted.gathered += chunk not in self.open
        begin(self, chunk, part)
        counted.most_whole = max(counted.most_whole, len(self.open))

    with mock.patch.object(GatheredChunks, "begin", begin_and_count):
        yield counted


def run(name: str, order: str) -> dict[str, Any]:
    """One model in one order; its row."""
    program = MODELS[name]()
    program.model.float()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    used: Sequence[nn.Parameter] | None = order_of_use(Loss(program)) if order == "use" else None
    parameters = sum(one.numel() for one in program.model.parameters())
    optimizer = in_chunks(program, update_on="device", mesh=mesh, order=used)
    assert isinstance(optimizer, ChunkedOptimizer)
    for _ in range(_STEPS):
        with counting() as counted:
            program.loss().backward()
            optimizer.step()
    layout = optimizer.data.layout
    return {
        "model": name,
        "order": order,
        "chunks": layout.chunks,
        "gathered_chunks": counted.gathered,
        "gathered_share": counted.gathered * layout.chunk_numel / parameters,
        "most_whole": counted.most_whole,
        "whole_share": counted.most_whole * layout.chunk_numel / parameters,
    }


def main() -> None:
    """All models in both orders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", default="benchmarks/results")
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = Result(name="chunk_order", title="Chunks on two ranks, by the order of their tensors", columns=COLUMNS)
    for name in MODELS:
        for order in ("registration", "use"):
            row = run(name, order)
            if dist.get_rank() == 0:
                result.add(**row)
    if dist.get_rank() == 0:
        result.write(given.output_dir)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
