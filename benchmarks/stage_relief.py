"""A GPT as one stage within less memory than it wants: measured beside predicted, and beside checkpoints of all blocks.

    python -m benchmarks.stage_relief      # an H200
    python -m benchmarks.stage_relief --tiny --output-dir /tmp/out

Forward and backward of one microbatch. A limit is a share of plain's peak, of which a tenth stays free. What the stage
gives up for it is decided by `torch_lms.create_balanced_partition` from a profile, once with segments that are computed
again alone, once with swaps as well. Each row is a process of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks import peers
from benchmarks.equal_peak import at_most
from benchmarks.plan_worker import Run
from benchmarks.results import Check, Result
from benchmarks.sweep import Row, Sweep, add_arguments, run_rows
from benchmarks.training import GIB
from benchmarks.workloads import Program
from torch_lms import create_balanced_partition
from torch_lms.balanced import BalanceConfig
from torch_lms.partition import KEEP_ALL, CostModel, LinkSpec, MemoryRelief, RecomputeAndSwap
from torch_lms.partition.costs import slower_of
from torch_lms.profile.links import measure_link
from torch_lms.profile.profiler import ProfileConfig
from torch_lms.stages.running import Stages

COLUMNS = [
    ("mode", "Stage", "{}"),
    ("limit_gib", "Limit (GiB)", "{:.1f}"),
    ("step_ms", "Step (ms)", "{:.1f}"),
    ("ratio", "/ plain", "{:.3f}"),
    ("predicted_ratio", "Predicted", "{:.3f}"),
    ("peak_gib", "Peak (GiB)", "{:.2f}"),
    ("predicted_gib", "Predicted (GiB)", "{:.2f}"),
    ("recomputed", "Computed again", "{}"),
    ("swapped", "Swapped", "{}"),
    ("equal", "Bit-equal", "{}"),
]
SHARES = (70, 50, 35)  # per cent
MOST_RATIOS = {"swap-70": 1.15}
_TINY_LINK = LinkSpec(bytes_per_us=5000.0, latency_us=20.0)  # a CPU's memory has no link to the host


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to run the model.

    Attributes:
        title: of its row.
        share: of plain's peak, in per cent; None for no limit.
        relief: what the stage may give up: nothing, segments computed again, or these and swaps.
        is_stage: whether it runs as a stage.
    """

    title: str
    share: int | None = None
    relief: str = "nothing"
    is_stage: bool = True


WAYS = {
    "plain": Way(title="the model as it is", is_stage=False),
    "checkpoints": Way(title="the model, all blocks checkpointed", is_stage=False),
    "stage": Way(title="without a limit"),
    **{
        f"{relief}-{share}": Way(title=f"{words}, {share} %", share=share, relief=relief)
        for share in SHARES
        for relief, words in (("recompute", "computes again"), ("swap", "computes again and swaps"))
    },
}


class _InputsFoundError(Exception):
    """Ends a forward as soon as its inputs are known."""


def inputs_of(program: Program) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the program calls its model with."""
    found: list[Any] = []

    def note(_: Any, args: Any, kwargs: Any) -> None:
        found.extend((args, kwargs))
        raise _InputsFoundError

    handle = program.model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        program.loss()
    except _InputsFoundError:
        pass
    finally:
        handle.remove()
    return found[0], found[1]


def host_link(device: torch.device) -> LinkSpec:
    """The slower way between a device and the host."""
    return slower_of([measure_link(*ends) for ends in ((str(device), "cpu"), ("cpu", str(device)))])


def relief_of(kind: str, device: torch.device) -> MemoryRelief | None:
    """What may be given up; swaps need not come last."""
    if kind == "swap":
        return RecomputeAndSwap(host_link=host_link(device) if device.type == "cuda" else _TINY_LINK)
    return RecomputeAndSwap() if kind == "recompute" else KEEP_ALL


def as_one_stage(program: Program, *, relief: str, cap_bytes: int | None) -> None:
    """Puts a stage in the model's place."""
    args, kwargs = inputs_of(program)
    device = next(program.model.parameters()).device
    config = BalanceConfig(
        profile=ProfileConfig(warmup_runs=3, timed_runs=10, progress=False),
        cost=CostModel(microbatches=1, optimizer_multiplier=2),
        memory_cap_bytes=cap_bytes,
        relief=relief_of(relief, device),
    )
    stages = create_balanced_partition(program.model, [str(device)], *args, config=config, **kwargs)
    program.model, program.blocks = stages, []
    program.loss = lambda: stages(*args, **kwargs)


def facts_of(program: Program, _: object) -> Row:
    """What was predicted of the stage, and what it gives up."""
    assert isinstance(program.model, Stages)
    found = program.model.partition
    assert found is not None
    given_up = found.stage_relief[0] if found.stage_relief else None
    return {
        "predicted_ms": found.step_us / 1e3,
        "predicted_gib": found.stage_memory_bytes[0] / GIB,
        "recomputed": len(given_up.recomputed) if given_up else 0,
        "swapped": len(given_up.swapped) if given_up else 0,
    }


def judge(rows: Sequence[Row]) -> Iterator[Check]:
    """The checks of the rows; adds to them what follows from others."""
    found = {row["key"]: row for row in rows}
    stage, checkpoints = found.get("stage"), found.get("checkpoints")
    for key, row in found.items():
        if WAYS[key].is_stage and stage is not None:
            row["predicted_ratio"] = row["predicted_ms"] / stage["predicted_ms"]
        if "equal" in row:
            yield Check(what=f"{row['mode']}: bit-equal", target="yes", measured=row["equal"], ok=row["equal"] == "yes")
        if row["device"] == "cpu" or "limit_gib" not in row:
            continue
        yield at_most(f"{row['mode']}: peak over the limit", row["peak_gib"] / row["limit_gib"], 1)
        if key in MOST_RATIOS and "ratio" in row:
            yield at_most(f"{row['mode']}: / plain", row["ratio"], MOST_RATIOS[key])
        if checkpoints is not None and checkpoints["peak_gib"] <= row["limit_gib"]:
            yield at_most(f"{row['mode']}: / all blocks checkpointed", row["step_ms"] / checkpoints["step_ms"], 1)


def measure_row(sweep: Sweep, key: str) -> None:
    """Runs the model in one way."""
    way = WAYS[key]
    limit: Row = {}
    cap_bytes = None
    if way.share is not None:
        plain = sweep.row("plain")
        if plain is None:
            print(f"--- {key} needs the row of plain", flush=True)
            return
        limit["limit_gib"] = plain["peak_gib"] * way.share / 100
        cap_bytes = int(limit["limit_gib"] * GIB)
    change = partial(as_one_stage, relief=way.relief, cap_bytes=cap_bytes) if way.is_stage else None
    run = Run(
        workload="gpt",
        device=sweep.device,
        tiny=sweep.given.tiny,
        change=peers.checkpoint_all if key == "checkpoints" else change,
        facts=facts_of if way.is_stage else None,
        steps=sweep.given.steps,
    )
    sweep.run(key, way.title, run, against="plain", **limit)


def main() -> None:
    """Runs the rows that the command names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, seconds=300)
    given = parser.parse_args()
    title = "A GPT of 1.3 thousand million parameters as one stage with too little memory, forward and backward"
    run_rows(Result(name="stage_relief", title=title, columns=COLUMNS), given, list(WAYS), judge, measure_row)


if __name__ == "__main__":
    main()
