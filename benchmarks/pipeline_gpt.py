"""A model on several devices: the automatic split against splits by hand, in one job.

    torchrun --nproc-per-node 2 -m benchmarks.pipeline_gpt --splits automatic,13/11,14/10,15/9
    torchrun --nproc-per-node 4 -m benchmarks.pipeline_gpt --model llama --splits automatic,hand@3
    torchrun --nproc-per-node 4 -m benchmarks.pipeline_gpt --model llama --schedule zero_bubble
    torchrun --nproc-per-node 2 -m benchmarks.pipeline_gpt --device cpu --output build/results

Every split is one call of `torch_lms.pipeline.train`, as a program of one's own makes it: rank 0 profiles a microbatch
on its device, and all ranks train their stages, from the same parameters and with the same batches. A split by hand is
an algorithm of our own: ``12/12`` has 12 blocks in each stage, what comes before the first block (embeddings) in the
first one, and what comes after the last (norm, head and loss) in the last. ``torchgpipe`` is that library's way: blocks
balanced by time, each stage computed again as a whole. ``hand@3`` stands for the best splits by hand that are predicted
to take at most 3 % longer than the best of them. Predictions are those of the partition.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.pipeline_models import MODELS, Shape
from benchmarks.pipeline_splits import AUTOMATIC, HAND, Keeping, TorchGPipe, find_algorithm, splits_by_hand
from benchmarks.results import Result
from torch_lms.partition.interface import Partition
from torch_lms.pipeline.chart import draw_charts, predict
from torch_lms.pipeline.timeline import MeasuredStep
from torch_lms.pipeline.torch_backend import SCHEDULES
from torch_lms.pipeline.training import TrainingPipeline, train
from torch_lms.profile.profiler import ProfileConfig
from torch_lms.schedules.actions import FORWARD
from torch_lms.schedules.rules import ONE_STAGE_EACH
from torch_lms.schedules.simulation import Event

GIB = 1 << 30
_NO_CAP_BYTES = 1 << 60  # what a device has would make the planner compute segments again


@dataclass(frozen=True)
class Job:
    """What all splits have in common."""

    model: str
    shape: Shape
    device: torch.device
    schedule: str
    stages: int
    microbatches: int
    steps: int
    warmup_steps: int
    profile_runs: int
    learning_rate: float
    cap_gib: float | None

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """The same tokens for every split and on every rank."""
        whole = self.shape.batch(self.microbatches * self.shape.rows, step)
        return {name: value.to(self.device) for name, value in whole.items()}

    def make_model(self) -> nn.Module:
        """On the CPU, the same on every rank; the device, which draws it, keeps nothing of it."""
        torch.manual_seed(0)
        with torch.device(self.device):
            return self.shape.make().to(self.dtype).cpu()

    def train(self, algorithm: Keeping) -> TrainingPipeline:
        """The pipeline that an algorithm cuts; from then on each rank has no more memory than the cap."""
        cap_bytes = None if self.cap_gib is None else int(self.cap_gib * GIB)
        other = algorithm.algorithm if isinstance(algorithm.algorithm, TorchGPipe) else None
        found = train(
            self.make_model(),
            None,
            self.batch(0),
            schedule=self.schedule,
            stages=self.stages,
            microbatches=self.microbatches,
            optimizer=partial(torch.optim.AdamW, lr=self.learning_rate, fused=self.device.type == "cuda"),
            device=self.device,
            algorithm=algorithm,
            memory_cap_bytes=cap_bytes if other is None else _NO_CAP_BYTES,  # torchgpipe plans for none
            profile=ProfileConfig(warmup_runs=3, timed_runs=self.profile_runs, device=self.device, progress=False),
        )
        if other is not None:
            if any(one.recomputed or one.swapped for one in found.partition.stage_relief):
                raise RuntimeError("expected torchgpipe's stages to be computed again as a whole, found parts of them")
            other.checkpoint(found.stages)
        if cap_bytes is not None and self.device.type == "cuda":
            torch.cuda.empty_cache()
            whole_bytes = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(cap_bytes / whole_bytes, self.device)
        return found


def make_job(args: argparse.Namespace, device: torch.device) -> Job:
    """The sizes of the benchmark, or tiny ones for a CPU."""
    shape = MODELS[args.model][args.device]
    if args.layers:
        shape = replace(shape, config={**shape.config, shape.layers: args.layers})
    shape = replace(shape, rows=args.rows or shape.rows)
    stages = args.stages or dist.get_world_size() * (1 if args.schedule in ONE_STAGE_EACH else 2)
    tiny = args.device == "cpu"
    return Job(
        model=args.model,
        shape=shape,
        device=device,
        schedule=args.schedule,
        stages=stages,
        microbatches=args.microbatches or (4 if tiny else 8),
        steps=args.steps or (3 if tiny else 10),
        warmup_steps=1 if tiny else 3,
        profile_runs=args.profile_runs or (5 if tiny else 20),
        learning_rate=1e-3 if tiny else 1e-4,
        cap_gib=args.cap_gib,
    )


def columns(stages: int) -> list[tuple[str, str, str]]:
    """Key, heading and format of each column."""
    made = [("split", "Split", "{}"), ("step_ms", "Step (ms)", "{:.0f}"), ("predicted_ms", "Predicted (ms)", "{:.0f}")]
    for stage in range(stages):
        made.append((f"stage{stage}_ms", f"Stage {stage} (ms)", "{:.1f}"))
        made.append((f"stage{stage}_predicted_ms", "Predicted (ms)", "{:.1f}"))
    for stage in range(stages):
        made.append((f"stage{stage}_peak_gib", f"Peak {stage} (GiB)", "{:.1f}"))
        made.append((f"stage{stage}_predicted_peak_gib", "Predicted (GiB)", "{:.1f}"))
    return [*made, ("loss", "First loss", "{:.4f}")]


def run_split(job: Job, name: str, algorithm: Keeping, folder: Path) -> dict[str, Any]:
    """Trains a split; its row, on every rank."""
    begun = time.perf_counter()
    with job.train(algorithm) as pipeline:
        prepared_s = time.perf_counter() - begun
        times_ms: list[float] = []
        losses: list[float | None] = []
        for step in range(job.warmup_steps + job.steps):
            batch = job.batch(step)
            synchronize(job.device)
            begun = time.perf_counter()
            loss = pipeline.step(**batch)
            synchronize(job.device)
            times_ms.append(1e3 * (time.perf_counter() - begun))
            losses.append(None if loss is None else loss.item())
        measured = pipeline.measured(**job.batch(0))
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, (times_ms[job.warmup_steps :], losses))
        if dist.get_rank() == 0:
            partition = pipeline.partition
            print(f"{name}: ready in {prepared_s:.1f} s, cut by {partition.algorithm}: {partition.reason}", flush=True)
            if name == AUTOMATIC:
                draw(job, pipeline, measured.events, folder)
        steps_ms = [max(own) for own in zip(*(times for times, _ in told), strict=True)]
        row = {"split": name, "step_ms": statistics.median(steps_ms), "step_ms_all": steps_ms}
        row |= {
            "cap_gib": getattr(algorithm.algorithm, "cap_gib", None),
            "losses": told[-1][1],
            "loss": told[-1][1][0],
            "prepared_s": prepared_s,
        }
        return row | stage_figures(pipeline.partition, measured)


def synchronize(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def stage_figures(partition: Partition, measured: MeasuredStep) -> dict[str, Any]:
    """Times of one microbatch and peaks of each stage's device, which are not there where a device counts none."""
    figures = partition.figures
    found: dict[str, Any] = {"predicted_ms": figures.step.step_us / 1e3, "values_crossing_bytes": partition.cut_bytes}
    found |= {way: sum(len(getattr(one, way)) for one in partition.stage_relief) for way in ("recomputed", "swapped")}
    for stage in range(partition.stages):
        own = [event for event in measured.events if event.action.stage == stage]
        rank = own[0].rank
        forward_us, backward_us = measured_times(own)
        peak_bytes = measured.peak_memory_bytes[rank]
        found |= {
            f"stage{stage}_ms": (forward_us + backward_us) / 1e3,
            f"stage{stage}_forward_ms": forward_us / 1e3,
            f"stage{stage}_backward_ms": backward_us / 1e3,
            f"stage{stage}_predicted_ms": figures.stage_time_us[stage] / 1e3,
            f"stage{stage}_predicted_forward_ms": figures.stage_forward_us[stage] / 1e3,
            f"stage{stage}_predicted_backward_ms": figures.stage_backward_us[stage] / 1e3,
            f"stage{stage}_peak_gib": None if peak_bytes is None else peak_bytes / GIB,
            f"stage{stage}_predicted_peak_gib": figures.device_memory_bytes[rank] / GIB,
            f"stage{stage}_nodes": sum(one == stage for one in partition.stage_of.values()),
        }
    return found


def measured_times(events: Sequence[Event]) -> tuple[float, float]:
    """Forward and backward of a stage, a median over the microbatches; a backward may come in two parts."""
    spent_us: dict[tuple[bool, int], float] = {}
    for event in events:
        key = (event.action.kind == FORWARD, event.action.microbatch)
        spent_us[key] = spent_us.get(key, 0.0) + event.end_us - event.start_us
    forward, backward = (
        [time_us for (is_forward, _), time_us in spent_us.items() if is_forward is way] for way in (True, False)
    )
    return statistics.median(forward), statistics.median(backward)


def parse_args() -> argparse.Namespace:
    """The words of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", choices=tuple(MODELS), default="gpt")
    parser.add_argument("--schedule", choices=tuple(SCHEDULES), default="1f1b")
    parser.add_argument("--stages", type=int, help="in all; by default one on each rank, or two if they interleave")
    parser.add_argument("--splits", help="automatic,automatic@70,14/10; by default automatic and an even one")
    parser.add_argument("--algorithm", default="auto")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rows", type=int, help="of a microbatch")
    parser.add_argument("--cap-gib", type=float, help="memory of each rank, on CUDA")
    parser.add_argument("--microbatches", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--profile-runs", type=int)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    return parser.parse_args()


def start(args: argparse.Namespace) -> torch.device:
    """Joins the ranks; returns this one's device."""
    if args.device == "cpu":
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(minutes=10))
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timedelta(minutes=15), device_id=device)
    return device


def even_split(job: Job) -> str:
    """As many blocks in each stage, the first ones with one more where that does not go; T5 has them twice."""
    blocks = job.shape.config[job.shape.layers] * (2 if job.model == "t5" else 1)
    return "/".join(str((blocks + job.stages - 1 - stage) // job.stages) for stage in range(job.stages))


def file_name(job: Job) -> str:
    """Says what it is of; the tiny shapes are for checking only."""
    words = ["pipeline", job.model] + ["cpu"] * (job.device.type == "cpu")
    usual = job.schedule == "1f1b" and job.stages == 2
    return "_".join(words if usual else [*words, job.schedule, f"{job.stages}stages"])


def main() -> None:
    """All splits, one after the other."""
    args = parse_args()
    job = make_job(args, start(args))
    words = (args.splits or f"{AUTOMATIC},{even_split(job)}").split(",")
    shape, world = job.shape, dist.get_world_size()
    result = Result(
        name=file_name(job),
        title=f"{shape.name}, {shape.config[shape.layers]} layers, vocabulary {shape.config[shape.vocabulary]}, "
        f"{job.microbatches} microbatches of {shape.rows} x {shape.tokens}, {job.schedule}, {job.stages} stages on "
        f"{world} devices",
        columns=columns(job.stages),
    )
    last = Keeping(args.algorithm)
    while words:
        name = words.pop(0)
        if name.startswith(HAND):
            words = [*by_hand(last, float(name[len(HAND) :])), *words]
            continue
        gc.collect()
        if job.device.type == "cuda":
            torch.cuda.empty_cache()
        last = Keeping(find_algorithm(name, args.algorithm))
        row = run_split(job, name, last, args.output)
        if dist.get_rank() == 0:
            result.add(**row)
            result.write(args.output)  # also where a later split ends it all
    if dist.get_rank() == 0:
        add_checks(result, job.stages)
        result.write(args.output)
    dist.barrier()
    dist.destroy_process_group()


def by_hand(last: Keeping, percent: float) -> list[str]:
    """On all ranks, the splits by hand that are best for what was cut last; see `splits_by_hand`."""
    found = [[] if last.problem is None else splits_by_hand(last.problem, percent)]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def draw(job: Job, pipeline: TrainingPipeline, events: Sequence[Event], folder: Path) -> None:
    """The automatic split, predicted and measured."""
    figures = pipeline.partition.figures
    times = figures.stage_forward_us, figures.stage_backward_us, figures.cut_forward_us, figures.cut_backward_us
    predicted = predict(
        pipeline.schedule,
        *times,
        weights_us=figures.stage_weights_us,
        transfers_in_turn=figures.transfers_in_turn,
    )
    charts = {"predicted": predicted, "measured": events}
    try:
        picture = draw_charts(charts, folder / f"{file_name(job)}.svg", title=f"{job.shape.name}, automatic split")
        print("wrote", picture.name)
    except RuntimeError as error:
        print(f"no picture: {error}")


def add_checks(result: Result, stages: int) -> None:
    """The automatic split is as fast as the best one by hand, and all splits compute the same."""
    automatic = next((row for row in result.rows if row["split"] == AUTOMATIC), None)
    by_hand = [row["step_ms"] for row in result.rows if not row["split"].startswith(AUTOMATIC)]
    if automatic is not None and by_hand:
        ratio = automatic["step_ms"] / min(by_hand)
        what = "automatic split's step over that of the best split by hand"
        result.check(what, "<= 1.00", round(ratio, 3), round(ratio, 2) <= 1)
    losses = [row["loss"] for row in result.rows]
    spread = max(losses) - min(losses)
    result.check("first loss, largest difference between splits", "0", spread, spread == 0)
    for row in result.rows:
        split, off = row["split"], worst_off(row, stages, "ms")
        result.check(
            f"{row['split']}: predicted stage times off the measured ones", "<= 5 %", f"{off:.1%}", off <= 0.05
        )
        if row["stage0_peak_gib"] is not None:
            off = worst_off(row, stages, "peak_gib")
            result.check(f"{split}: predicted peaks off the measured ones", "<= 5 %", f"{off:.1%}", off <= 0.05)


def worst_off(row: Mapping[str, Any], stages: int, key: str) -> float:
    """The largest part by which a stage's prediction differs from what was measured.

    Args:
        row: of a split.
        stages: how many it has.
        key: ``ms`` or ``peak_gib``.
    """
    pairs = [
        (float(row[f"stage{stage}_predicted_{key}"]), float(row[f"stage{stage}_{key}"])) for stage in range(stages)
    ]
    return max(abs(predicted / measured - 1) for predicted, measured in pairs)


if __name__ == "__main__":
    main()
