"""A GPT with a large vocabulary on two devices: the automatic split against splits by hand, in one job.

    torchrun --nproc-per-node 2 -m benchmarks.pipeline_gpt --output benchmarks/results
    torchrun --nproc-per-node 2 -m benchmarks.pipeline_gpt --device cpu --output build/results

Rank 0 profiles one microbatch on its device and cuts the model; then every split trains from the same parameters and
the same batches under 1F1B. A split by hand ``12/12`` has 12 blocks in each stage, the embeddings in the first one,
the last norm, the head and the loss in the last.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.results import Result
from torch_lms.balanced import BalanceConfig, BalancedPlan, plan_balanced_partition
from torch_lms.cli.models import GPT, GPTShape
from torch_lms.partition.costs import CostGraph, CostModel, DeviceSpec, optimizer_multiplier
from torch_lms.partition.interface import PartitionProblem, evaluate
from torch_lms.pipeline.chart import draw_charts, predict
from torch_lms.pipeline.config import PipelineConfig
from torch_lms.pipeline.runner import Pipeline
from torch_lms.pipeline.timeline import peak_memory_bytes, reset_peak_memory
from torch_lms.profile.profiler import ProfileConfig
from torch_lms.schedules.actions import FORWARD
from torch_lms.schedules.rules import one_f_one_b
from torch_lms.schedules.simulation import Event
from torch_lms.stages.cutting import split
from torch_lms.stages.stage_code import owner

GIB = 1 << 30
STAGES = 2
AUTOMATIC = "automatic"
COLUMNS = [
    ("split", "Split", "{}"),
    ("step_ms", "Step (ms)", "{:.0f}"),
    ("predicted_ms", "Predicted (ms)", "{:.0f}"),
    ("stage0_ms", "Stage 0 (ms)", "{:.1f}"),
    ("stage0_predicted_ms", "Predicted (ms)", "{:.1f}"),
    ("stage1_ms", "Stage 1 (ms)", "{:.1f}"),
    ("stage1_predicted_ms", "Predicted (ms)", "{:.1f}"),
    ("stage0_peak_gib", "Peak 0 (GiB)", "{:.1f}"),
    ("stage0_predicted_peak_gib", "Predicted (GiB)", "{:.1f}"),
    ("stage1_peak_gib", "Peak 1 (GiB)", "{:.1f}"),
    ("stage1_predicted_peak_gib", "Predicted (GiB)", "{:.1f}"),
    ("loss", "First loss", "{:.4f}"),
]


@dataclass(frozen=True)
class Job:
    """What all splits have in common."""

    shape: GPTShape
    device: torch.device
    dtype: torch.dtype
    microbatches: int
    rows: int
    steps: int
    warmup_steps: int
    profile_runs: int
    learning_rate: float

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same tokens for every split and on every rank."""
        generator = torch.Generator().manual_seed(step)
        size = (self.microbatches * self.rows, self.shape.tokens)
        ids = torch.randint(self.shape.vocabulary, size, generator=generator)
        return ids.to(self.device), ids.roll(-1, 1).to(self.device)

    def model(self) -> GPT:
        """On the device, the same on every rank."""
        torch.manual_seed(0)
        with torch.device(self.device):
            return GPT(self.shape).to(self.dtype)


def make_job(args: argparse.Namespace, device: torch.device) -> Job:
    """The sizes of the benchmark, or tiny ones for a CPU."""
    if args.device == "cpu":
        shape = GPTShape(layers=args.layers or 4, hidden=64, heads=4, tokens=32, vocabulary=1024)
        return Job(shape, device, torch.float32, 4, 2, args.steps or 3, 1, args.profile_runs or 5, 1e-3)
    shape = GPTShape(layers=args.layers or 24, hidden=2048, heads=16, tokens=2048, vocabulary=128_256)
    return Job(shape, device, torch.bfloat16, 8, 4, args.steps or 10, 3, args.profile_runs or 20, 1e-4)


def plan_cut(job: Job, model: GPT, algorithm: str) -> BalancedPlan:
    """Profiles and partitions on rank 0, for both ranks."""
    ids, next_ids = (tensor[: job.rows] for tensor in job.batch(0))
    places = [f"rank:{rank}/{'cpu' if job.device.type == 'cpu' else f'cuda:{rank}'}" for rank in range(STAGES)]
    config = BalanceConfig(
        profile=ProfileConfig(warmup_runs=3, timed_runs=job.profile_runs, progress=False),
        cost=CostModel(schedule="1f1b", microbatches=job.microbatches),
    )
    return plan_balanced_partition(model, places, ids, next_ids, algorithm=algorithm, optimizer="adamw", config=config)


def leave_to_meta(*roots: nn.Module) -> None:
    """Exchanges all parameters for ones without storage: the splits begin from a state dict."""
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for root in roots:
        for module in root.modules():
            for name, value in module._parameters.items():
                if value is not None and not value.is_meta:
                    if id(value) not in made:
                        made[id(value)] = (value, nn.Parameter(torch.empty_like(value, device="meta")))
                    module._parameters[name] = made[id(value)][1]


def cut_by_hand(plan: BalancedPlan, first_blocks: int) -> dict[str, int]:
    """Everything before the first line of block ``first_blocks`` is stage 0."""
    assert plan.traced.graph_module is not None
    names: list[str] = []
    border: int | None = None
    for node in plan.traced.graph_module.graph.nodes:
        if not node.op.startswith("call_"):
            continue
        if border is None and f"{owner(node)}.".startswith(f"blocks.{first_blocks}."):
            border = len(names)
        names.append(node.name)
    if border is None:
        raise SystemExit(f"expected a block {first_blocks} in the graph, found none; choose another split")
    return {name: int(index >= border) for index, name in enumerate(names)}


def run_split(job: Job, plan: BalancedPlan, stage_of: Mapping[str, int], state: Mapping[str, Any]) -> dict[str, Any]:
    """Trains a split from the given parameters; what it measured, on every rank."""
    stages = split(plan.traced, stage_of, model=plan.traced.model)
    config = PipelineConfig(schedule="1f1b", microbatches=job.microbatches)
    with Pipeline(stages, device=job.device, config=config, state_dict=state) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=job.learning_rate, fused=job.device.type == "cuda")
        times_ms, losses = [], []
        for step in range(job.warmup_steps + job.steps):
            ids, next_ids = job.batch(step)
            if step == job.warmup_steps:
                reset_peak_memory(job.device)
            synchronize(job.device)
            begun = time.perf_counter()
            loss = pipeline.step(ids, next_ids)
            synchronize(job.device)
            scheduled = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            synchronize(job.device)
            times_ms.append((1e3 * (time.perf_counter() - begun), 1e3 * (scheduled - begun)))
            losses.append(None if loss is None else loss.item())
        peak_bytes = peak_memory_bytes(job.device)
        events = pipeline.measured(*job.batch(0)).events
        told: list[Any] = [None] * STAGES
        dist.all_gather_object(told, (times_ms[job.warmup_steps :], losses, peak_bytes))
    return {"told": told, "events": events, "borders": [len(stage.outputs) for stage in stages[:-1]]}


def synchronize(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_row(
    job: Job, plan: BalancedPlan, name: str, stage_of: Mapping[str, int], ran: dict[str, Any]
) -> dict[str, Any]:
    """A split's figures; times of stages are of one microbatch, peaks are not there where the device counts none."""
    times = [[step for step, _ in rank[0]] for rank in ran["told"]]
    steps_ms = [max(both) for both in zip(*times, strict=True)]
    scheduled_ms = [max(both) for both in zip(*([part for _, part in rank[0]] for rank in ran["told"]), strict=True)]
    forward_us, backward_us = predicted_times(plan, stage_of)
    events = predict(one_f_one_b(STAGES, job.microbatches), forward_us, backward_us)
    row: dict[str, Any] = {
        "split": name,
        "step_ms": statistics.median(steps_ms),
        "scheduled_ms": statistics.median(scheduled_ms),
        "predicted_ms": max(event.end_us for event in events) / 1e3,
        "step_ms_all": steps_ms,
        "losses": ran["told"][-1][1],
        "loss": ran["told"][-1][1][0],
        "values_crossing": ran["borders"],
    }
    predicted_bytes = predicted_memory(job, plan, stage_of)
    for stage in range(STAGES):
        forward, backward = measured_times(ran["events"], stage)
        peak_bytes = ran["told"][stage][2]
        row |= {
            f"stage{stage}_ms": (forward + backward) / 1e3,
            f"stage{stage}_forward_ms": forward / 1e3,
            f"stage{stage}_backward_ms": backward / 1e3,
            f"stage{stage}_predicted_ms": (forward_us[stage] + backward_us[stage]) / 1e3,
            f"stage{stage}_predicted_forward_ms": forward_us[stage] / 1e3,
            f"stage{stage}_predicted_backward_ms": backward_us[stage] / 1e3,
            f"stage{stage}_peak_gib": None if peak_bytes is None else peak_bytes / GIB,
            f"stage{stage}_predicted_peak_gib": predicted_bytes[stage] / GIB,
            f"stage{stage}_nodes": sum(value == stage for value in stage_of.values()),
        }
    if name == AUTOMATIC:
        assert plan.profile is not None
        row["node_scale"] = plan.profile.node_scale
    return row


def predicted_times(plan: BalancedPlan, stage_of: Mapping[str, int]) -> tuple[list[float], list[float]]:
    """Forward and backward of each stage, from the profile of the nodes."""
    assert plan.profile is not None
    forward_us, backward_us = [0.0] * STAGES, [0.0] * STAGES
    for node in plan.profile.nodes:
        if node.name in stage_of:
            forward_us[stage_of[node.name]] += node.forward_us
            backward_us[stage_of[node.name]] += node.backward_us
    return forward_us, backward_us


def predicted_memory(job: Job, plan: BalancedPlan, stage_of: Mapping[str, int]) -> tuple[int, ...]:
    """The peak of each stage's device in bytes, from the profile of the nodes."""
    assert plan.profile is not None
    prices = CostModel(
        schedule="1f1b", microbatches=job.microbatches, optimizer_multiplier=optimizer_multiplier("adamw")
    )
    devices = tuple(DeviceSpec(name=name) for name in plan.partition.devices)
    problem = PartitionProblem(graph=CostGraph.from_profile(plan.profile), devices=devices, cost_model=prices)
    stages = np.array([stage_of[names[0]] for names in problem.units.members])
    return evaluate(problem, stages, algorithm="given", reason="").device_memory_bytes


def measured_times(events: Sequence[Event], stage: int) -> tuple[float, float]:
    """Median over the microbatches."""
    own = [event for event in events if event.action.stage == stage]
    forward = [event.end_us - event.start_us for event in own if event.action.kind == FORWARD]
    backward = [event.end_us - event.start_us for event in own if event.action.kind != FORWARD]
    return statistics.median(forward), statistics.median(backward)


def parse_args() -> argparse.Namespace:
    """The words of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--splits", help="by hand, blocks of the first and the last stage: 12/12,14/10")
    parser.add_argument("--algorithm", default="auto")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--profile-runs", type=int)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    return parser.parse_args()


def start(args: argparse.Namespace) -> torch.device:
    """Joins the ranks; returns this one's device."""
    rank = int(os.environ["LOCAL_RANK"])
    if int(os.environ["WORLD_SIZE"]) != STAGES:
        raise SystemExit(f"expected {STAGES} ranks, found {os.environ['WORLD_SIZE']}; use --nproc-per-node {STAGES}")
    if args.device == "cpu":
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(minutes=10))
        return torch.device("cpu")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timedelta(minutes=15), device_id=device)
    return device


def main() -> None:
    """All splits, one after the other."""
    args = parse_args()
    job = make_job(args, start(args))
    leader = dist.get_rank() == 0
    model = job.model()
    state = {name: value.cpu() for name, value in model.state_dict().items()}
    begun = time.perf_counter()
    plan = plan_cut(job, model, args.algorithm)
    if leader:
        found = plan.partition
        print(f"planned in {time.perf_counter() - begun:.1f} s by {found.algorithm}: {found.reason}", flush=True)
        print("notes:", *plan.traced.notes, sep="\n  ", flush=True)
    assert plan.traced.graph_module is not None
    leave_to_meta(model, plan.traced.graph_module)
    half = job.shape.layers // 2
    more = max(half + 1, 14 * job.shape.layers // 24)
    hands = (args.splits or f"{half}/{half},{more}/{job.shape.layers - more}").split(",")
    cuts = {AUTOMATIC: dict(plan.partition.stage_of)}
    cuts |= {hand: cut_by_hand(plan, int(hand.split("/")[0])) for hand in hands}
    # The file's name says which shape it is of: the tiny one is for checking only.
    result = Result(
        name="pipeline_gpt" if args.device == "cuda" else "pipeline_gpt_cpu",
        title=f"GPT, {job.shape.layers} layers, hidden {job.shape.hidden}, vocabulary {job.shape.vocabulary}, "
        f"{job.microbatches} microbatches of {job.rows} x {job.shape.tokens}, 1F1B on two devices",
        columns=COLUMNS,
    )
    for name, stage_of in cuts.items():
        gc.collect()
        if job.device.type == "cuda":
            torch.cuda.empty_cache()
        ran = run_split(job, plan, stage_of, state)
        if leader:
            result.add(**make_row(job, plan, name, stage_of, ran))
            if name == AUTOMATIC:
                draw(job, plan, stage_of, ran, args.output)
    if leader:
        add_checks(result)
        result.write(args.output)
    dist.barrier()
    dist.destroy_process_group()


def draw(job: Job, plan: BalancedPlan, stage_of: Mapping[str, int], ran: dict[str, Any], folder: Path) -> None:
    """The automatic split, predicted and measured."""
    predicted = predict(one_f_one_b(STAGES, job.microbatches), *predicted_times(plan, stage_of))
    charts = {"predicted": predicted, "measured": ran["events"]}
    try:
        print(
            "wrote", draw_charts(charts, folder / f"pipeline_gpt_{job.device.type}.svg", title="automatic split").name
        )
    except RuntimeError as error:
        print(f"no picture: {error}")


def add_checks(result: Result) -> None:
    """The automatic split is as fast as the best one by hand, and all splits compute the same."""
    by_name = {row["split"]: row for row in result.rows}
    automatic = by_name.pop(AUTOMATIC)
    best = min(row["step_ms"] for row in by_name.values())
    ratio = automatic["step_ms"] / best
    what = "automatic split's step over that of the best split by hand"
    result.check(what, "<= 1.00", round(ratio, 3), round(ratio, 2) <= 1)
    spread = max(abs(row["loss"] - automatic["loss"]) for row in by_name.values())
    result.check("first loss, largest difference between splits", "0", spread, spread == 0)
    off = max(abs(automatic[f"stage{s}_predicted_ms"] / automatic[f"stage{s}_ms"] - 1) for s in range(STAGES))
    result.check("predicted stage times off the measured ones", "<= 5 %", f"{100 * off:.1f} %", off <= 0.05)
    if automatic["stage0_peak_gib"] is not None:
        pairs = [(automatic[f"stage{s}_predicted_peak_gib"], automatic[f"stage{s}_peak_gib"]) for s in range(STAGES)]
        off = max(abs(predicted / peak - 1) for predicted, peak in pairs)
        result.check("predicted peaks off the measured ones", "<= 5 %", f"{100 * off:.1f} %", off <= 0.05)


if __name__ == "__main__":
    main()
