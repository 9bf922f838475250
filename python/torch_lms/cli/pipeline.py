"""``torchrun --nproc-per-node 2 -m torch_lms pipeline``: trains a GPT as a pipeline, cut automatically.

    torchrun --nproc-per-node 2 -m torch_lms pipeline --device cpu --output build/pipeline.svg

Rank 0 profiles one microbatch and cuts the model; every rank then trains its stage. At the end predicted and measured
times are shown beside each other, as a table and as a picture; in the table peaks of memory as well.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from torch_lms.cli.lines import print_line
from torch_lms.cli.models import GPT, GPTShape
from torch_lms.cli.text import VOCABULARY, TextBatches, read_text
from torch_lms.errors import LmsError
from torch_lms.memory_sizes import parse_bytes
from torch_lms.partition.figures import Figures
from torch_lms.pipeline.chart import draw_charts, predict
from torch_lms.pipeline.timeline import MeasuredStep
from torch_lms.pipeline.torch_backend import SCHEDULES
from torch_lms.pipeline.training import TrainingPipeline, train
from torch_lms.profile.profiler import ProfileConfig
from torch_lms.schedules.actions import FORWARD
from torch_lms.schedules.simulation import Event

__all__ = ["add_pipeline", "main", "run_pipeline"]

_TIMEOUT = timedelta(minutes=10)
_MIB = 1 << 20


def add_pipeline(parser: argparse.ArgumentParser) -> None:
    """Gives a parser the words of ``pipeline``."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--schedule", choices=tuple(SCHEDULES), default="1f1b", help="(%(default)s)")
    parser.add_argument(
        "--stages", type=int, help="in all; by default one on each rank, or two for schedules that interleave"
    )
    parser.add_argument("--microbatches", type=int, default=4, help="that a batch is cut into (%(default)s)")
    parser.add_argument("--executor", choices=("auto", "torch", "own"), default="auto", help="(%(default)s)")
    parser.add_argument("--algorithm", default="auto", help="of the partition (%(default)s)")
    parser.add_argument("--cap", help="memory of each device, such as 24GiB; stages without room give up segments")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps (%(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="excerpts a step (%(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="blocks (%(default)s)")
    parser.add_argument("--width", type=int, default=128, help="hidden size (%(default)s)")
    parser.add_argument("--heads", type=int, default=4, help="attention heads (%(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="bytes an excerpt (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and data (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="of AdamW (%(default)s)")
    parser.add_argument("--output", type=Path, help="draw the pipeline, predicted and measured: a .svg or .png file")
    parser.add_argument("--code", type=Path, help="write the stages' generated code into this folder")


def run_pipeline(given: argparse.Namespace) -> int:
    """Trains; returns the exit status."""
    if "RANK" not in os.environ:
        print(
            "torch_lms: expected to be started by torchrun, found no RANK; run "
            "torchrun --nproc-per-node 2 -m torch_lms pipeline",
            file=sys.stderr,
        )
        return 2
    device = torch.device("cpu")
    if given.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if device.index < torch.cuda.device_count():
            torch.cuda.set_device(device)
    dist.init_process_group("nccl" if given.device == "cuda" else "gloo", timeout=_TIMEOUT)
    try:
        _train(given, device)
    except (LmsError, ValueError) as error:
        print(f"torch_lms: rank {dist.get_rank()}: {error}", file=sys.stderr)
        return 1
    dist.destroy_process_group()
    return 0


def _train(given: argparse.Namespace, device: torch.device) -> None:
    console = Console(quiet=dist.get_rank() != 0)
    torch.manual_seed(given.seed)
    shape = GPTShape(
        layers=given.layers, hidden=given.width, heads=given.heads, tokens=given.tokens, vocabulary=VOCABULARY
    )
    model = GPT(shape)
    batches = TextBatches(read_text(), batch=given.batch, tokens=given.tokens, seed=given.seed)
    options: dict[str, Any] = {"schedule": given.schedule, "microbatches": given.microbatches, "seed": given.seed}
    profile = ProfileConfig(warmup_runs=2, timed_runs=10, device=device, progress=False)
    optimizer = partial(torch.optim.AdamW, lr=given.learning_rate)
    sample = torch.randint(VOCABULARY, (given.batch, given.tokens))
    with train(
        model,
        None,
        (sample, sample.roll(-1, 1)),
        optimizer=optimizer,
        stages=given.stages,
        device=device,
        algorithm=given.algorithm,
        executor=given.executor,
        profile=profile,
        memory_cap_bytes=None if given.cap is None else parse_bytes(given.cap),
        **options,
    ) as pipeline:
        console.print(_stage_table(pipeline))
        if given.code is not None:
            _write_code(given.code, pipeline)
        for step in range(given.steps):
            loss = pipeline.step(*batches.draw())
            if loss is not None:
                print(f"step {step + 1} of {given.steps}: loss {loss.item():.4f}", flush=True)
        measured = pipeline.measured(*batches.draw())
        console.print(_measured_table(pipeline.partition.figures, measured, given.microbatches, device))
        if given.output is not None and dist.get_rank() == 0:
            print_line(console, f"wrote {_draw(given.output, pipeline, measured.events)}")


def _write_code(folder: Path, pipeline: TrainingPipeline) -> None:
    """Each rank that of its own stages."""
    folder.mkdir(parents=True, exist_ok=True)
    for stage in pipeline.stages:
        stage.save_code(folder / f"stage{stage.index}.py")


def _stage_table(pipeline: TrainingPipeline) -> Table:
    found = pipeline.partition
    table = Table(title=f"partition by {found.algorithm}")
    for heading in ("stage", "nodes", "forward (ms)", "backward (ms)", "memory (MiB)", "sent on (MiB)", "gives up"):
        table.add_column(heading, justify="right")
    figures = found.figures
    for stage in range(found.stages):
        sent = f"{figures.cut_forward_bytes[stage] / _MIB:.2f}" if stage + 1 < found.stages else ""
        table.add_row(
            str(stage),
            str(sum(one == stage for one in found.stage_of.values())),
            f"{figures.stage_forward_us[stage] / 1e3:.2f}",
            f"{figures.stage_backward_us[stage] / 1e3:.2f}",
            f"{figures.stage_memory_bytes[stage] / _MIB:.1f}",
            sent,
            str(found.stage_relief[stage]) if found.stage_relief else "",
        )
    return table


def _measured_table(figures: Figures, step: MeasuredStep, microbatches: int, device: torch.device) -> Table:
    """Each stage's times of a microbatch and its device's peak, and the step, beside what was predicted."""
    events, peaks = step.events, step.peak_memory_bytes
    step_us = max(event.end_us for event in events) - min(event.start_us for event in events)
    table = Table(
        title=f"a step: {step_us / 1e3:.2f} ms, predicted {figures.step.step_us / 1e3:.2f} ms",
        caption="peaks: of all stages of a rank's device together"
        + (f"; none measured, for {device.type} does not count its allocations" if None in peaks else ""),
    )
    for heading in ("stage", "forward (ms)", "predicted", "backward (ms)", "predicted", "peak (MiB)", "predicted"):
        table.add_column(heading, justify="right")
    for stage in range(len(figures.stage_memory_bytes)):
        own = [event for event in events if event.action.stage == stage]
        forward_us = sum(event.end_us - event.start_us for event in own if event.action.kind == FORWARD)
        backward_us = sum(event.end_us - event.start_us for event in own) - forward_us
        times_us = (
            *(forward_us / microbatches, figures.stage_forward_us[stage]),
            *(backward_us / microbatches, figures.stage_backward_us[stage]),
        )
        memory_bytes = peaks[own[0].rank], figures.device_memory_bytes[own[0].rank]
        table.add_row(
            str(stage),
            *(f"{time_us / 1e3:.2f}" for time_us in times_us),
            *("" if nbytes is None else f"{nbytes / _MIB:.1f}" for nbytes in memory_bytes),
        )
    return table


def _draw(path: Path, pipeline: TrainingPipeline, events: Sequence[Event]) -> Path:
    """Predicted, with transfers, and measured."""
    figures = pipeline.partition.figures
    predicted = predict(
        pipeline.schedule,
        figures.stage_forward_us,
        figures.stage_backward_us,
        figures.cut_forward_us,
        figures.cut_backward_us,
        weights_us=figures.stage_weights_us,
        transfers_in_turn=figures.transfers_in_turn,
    )
    return draw_charts({"predicted": predicted, "measured": events}, path, title=f"GPT, {pipeline.config.schedule}")


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m torch_lms.cli.pipeline``."""
    parser = argparse.ArgumentParser(prog="torch_lms pipeline", description="Train a GPT as a pipeline.")
    add_pipeline(parser)
    return run_pipeline(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
