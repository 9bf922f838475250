"""Schedules and splits of one model on several devices, each time in fresh processes, in rounds that are rotated.

    python -m benchmarks.pipeline_rounds --rounds 5 --ways 1f1b:automatic,1f1b:14/10
    python -m benchmarks.pipeline_rounds --ways interleaved:automatic,zero_bubble:automatic,1f1b:automatic@70
    python -m benchmarks.pipeline_rounds --device cpu --ranks 2 --ways 1f1b:automatic --output build/results

A way is a schedule and a split, as `pipeline_gpt` takes them. Each run of one is a torchrun of it that profiles anew.
Round r begins with way r. The file keeps the ways of earlier commands until they are run again.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.equal_peak import at_most
from benchmarks.pipeline_gpt import worst_off
from benchmarks.pipeline_models import MODELS
from benchmarks.pipeline_splits import AUTOMATIC
from benchmarks.results import Check, Result, command, commit

Row = dict[str, Any]
COLUMNS = [
    ("schedule", "Schedule", "{}"),
    ("split", "Split", "{}"),
    ("step_ms", "Step (ms)", "{:.0f}"),
    ("least_ms", "Least", "{:.0f}"),
    ("most_ms", "Most", "{:.0f}"),
    ("rounds", "Rounds", "{}"),
    ("predicted_ms", "Predicted (ms)", "{:.0f}"),
    ("peak_gib", "Largest peak (GiB)", "{:.1f}"),
    ("predicted_gib", "Predicted (GiB)", "{:.1f}"),
    ("cap_gib", "Cap (GiB)", "{:.1f}"),
    ("recomputed", "Computed again", "{}"),
    ("swapped", "Swapped", "{}"),
]
MOST_OFF = 0.05
MOST_CAPPED = 1.15
_TYPICAL_RUN_S = 60.0


def run_once(given: argparse.Namespace, schedule: str, split: str, more: Sequence[str] = ()) -> Row:
    """What `pipeline_gpt` says of one split, in processes of its own.

    Raises:
        RuntimeError: if it failed; with its ranks' errors.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = ["--device", given.device, "--model", given.model, "--schedule", schedule, "--splits", split]
        words += ["--steps", str(given.steps), "--profile-runs", str(given.profile_runs), "--output", folder, *more]
        launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(given.ranks)]
        line = [sys.executable, "-m", *launch, "-m", "benchmarks.pipeline_gpt", *words]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        written = list(Path(folder).glob("*.json"))
        if done.returncode != 0 or len(written) != 1:
            raise RuntimeError(f"{schedule} {split}: exit status {done.returncode}\n{reason_of(done.stderr)}")
        found: Row = json.loads(written[0].read_text())["rows"][0]
        return found


def reason_of(words: str) -> str:
    """What a failed run's ranks say of errors, each once. Else the end of it all: torchrun says how they ended."""
    lines = [re.sub(r"^\[rank\d+\]: ", "", line) for line in words.splitlines()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception)(: |$)|Cuda failure", line)]
    errors = dict.fromkeys(line for line in named if "ChildFailedError" not in line)  # torchrun's: of any end
    return "\n".join(errors) or words[-3000:]


def add_up(schedule: str, split: str, runs: Sequence[Row]) -> Row:
    """The row of a way: medians over its rounds, and of each figure what the rounds said."""
    steps_ms = [run["step_ms"] for run in runs]
    predicted_ms = [run["predicted_ms"] for run in runs]
    row: Row = {"key": f"{schedule}:{split}", "schedule": schedule, "split": split, "rounds": len(runs)}
    row |= {"step_ms": statistics.median(steps_ms), "least_ms": min(steps_ms), "most_ms": max(steps_ms)}
    row |= {"step_ms_all": steps_ms, "predicted_ms_all": predicted_ms, "predicted_ms": statistics.median(predicted_ms)}
    row |= {name: runs[-1][name] for name in ("cap_gib", "recomputed", "swapped", "loss")}
    stages = sum(name.endswith("_nodes") for name in runs[-1])
    row |= {"stage_off": statistics.median(worst_off(run, stages, "ms") for run in runs)}
    kinds = [f"{what}{way}_ms" for what in ("", "predicted_") for way in ("forward", "backward")]
    row |= {f"stages_{name}": [runs[-1][f"stage{stage}_{name}"] for stage in range(stages)] for name in kinds}
    peaks = [run[f"stage{stage}_peak_gib"] for run in runs for stage in range(stages)]
    if None not in peaks:
        row["peak_gib"] = max(peaks)
        row["predicted_gib"] = max(run[f"stage{stage}_predicted_peak_gib"] for run in runs for stage in range(stages))
        row["peak_off"] = statistics.median(worst_off(run, stages, "peak_gib") for run in runs)
        names = ("peak_gib", "predicted_peak_gib")
        row |= {f"stages_{name}": [runs[-1][f"stage{stage}_{name}"] for stage in range(stages)] for name in names}
    return row | {"commit": commit(), "command": command()}


def judge(rows: Sequence[Row]) -> Iterator[Check]:
    """The checks that these rows allow."""
    found = {row["key"]: row for row in rows}
    automatic = {row["schedule"]: row for row in rows if row["split"] == AUTOMATIC}
    for schedule, row in automatic.items():
        by_hand = [one["step_ms"] for one in rows if one["schedule"] == schedule and "/" in one["split"]]
        if by_hand:
            yield at_most(f"{schedule}: automatic over the best by hand", row["step_ms"] / min(by_hand), 1.0)
        capped = [one for one in rows if one["schedule"] == schedule and one["split"].startswith(f"{AUTOMATIC}@")]
        for one in capped:
            yield at_most(f"{one['key']}: over the step without a cap", one["step_ms"] / row["step_ms"], MOST_CAPPED)
    for key, row in found.items():
        yield at_most(f"{key}: predicted step off", abs(row["predicted_ms"] / row["step_ms"] - 1), MOST_OFF)
        yield at_most(f"{key}: predicted stage times off", row["stage_off"], MOST_OFF)
        if "peak_off" in row:
            yield at_most(f"{key}: predicted peaks off", row["peak_off"], MOST_OFF)
        if row["cap_gib"] is not None and "peak_gib" in row:
            yield at_most(f"{key}: peak over its cap", row["peak_gib"] / row["cap_gib"], 1.0)
    if len(automatic) > 1:
        preferred = min(automatic.values(), key=lambda row: row["predicted_ms"])["schedule"]
        fastest = min(automatic.values(), key=lambda row: row["step_ms"])["schedule"]
        yield Check(what="fastest schedule", target=preferred, measured=fastest, ok=preferred == fastest)


def make_parser(description: str | None, *, model: str, steps: int, profile_runs: int) -> argparse.ArgumentParser:
    """Of a program that has `run_once` run: the words that this needs, with their defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", choices=tuple(MODELS), default=model)
    parser.add_argument("--ranks", type=int, help="by default one for each GPU")
    parser.add_argument("--steps", type=int, default=steps, help="of each run, after warm-up")
    parser.add_argument("--profile-runs", type=int, default=profile_runs)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    return parser


def with_ranks(given: argparse.Namespace) -> argparse.Namespace:
    """The words, with a rank for each GPU where none are given."""
    given.ranks = given.ranks or torch.cuda.device_count()
    return given


def parse_args() -> argparse.Namespace:
    """The words of the command."""
    parser = make_parser(__doc__, model="gpt", steps=8, profile_runs=20)
    parser.add_argument("--ways", default=f"1f1b:{AUTOMATIC},interleaved:{AUTOMATIC},zero_bubble:{AUTOMATIC}")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=500, help="no run begins that would not end in them")
    return with_ranks(parser.parse_args())


def main() -> None:
    """All rounds; the file is written after each run."""
    given = parse_args()
    shape = MODELS[given.model][given.device]
    title = f"{shape.name}, 8 microbatches, on {given.ranks} devices, fresh processes in rotated rounds"
    result = Result(name="_".join(["pipeline_rounds", given.model, given.device]), title=title, columns=COLUMNS)
    kept = result.kept(given.output)
    ways: list[str] = given.ways.split(",")
    runs: dict[str, list[Row]] = {way: [] for way in ways}
    began, took_s = time.monotonic(), _TYPICAL_RUN_S
    for turn in range(given.rounds):
        first = turn % len(ways)
        for way in ways[first:] + ways[:first]:
            if time.monotonic() - began + took_s > given.seconds:
                print(f"not run: {way} in round {turn + 1}, {given.seconds:.0f} s are nearly over", flush=True)
                continue
            begun = time.monotonic()
            schedule, _, split = way.partition(":")
            try:
                runs[way].append(run_once(given, schedule, split))
            except RuntimeError as error:
                print(f"MISSED {error}", flush=True)
                continue
            took_s = time.monotonic() - begun
            kept[way] = add_up(schedule, split, runs[way])
            print(f"{way}: {runs[way][-1]['step_ms']:.1f} ms, {took_s:.0f} s in all", flush=True)
            result.rows = list(kept.values())
            result.checks = list(judge(result.rows))
            result.write(given.output)
    print(*result.checks, sep="\n")


if __name__ == "__main__":
    main()
