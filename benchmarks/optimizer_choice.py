"""AdamW as users write it where the model's state exceeds the limit, beside ``foreach=False``: as fast, bit-equal."""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch

import torch_lms
from benchmarks.model_state import empty, train
from benchmarks.results import Result
from benchmarks.training import GIB, make_deterministic
from torch_lms.cli.models import GPTShape
from torch_lms.memory_sizes import parse_bytes

MOST_OVER_SINGLE = 1.03
MOST_OVER_PLAIN = 1.5
COLUMNS = [
    ("mode", "Mode", "{}"),
    ("optimizer", "AdamW", "{}"),
    ("state_gib", "Model state (GiB)", "{:.1f}"),
    ("peak_gib", "Peak (GiB)", "{:.1f}"),
    ("step_ms", "Step (ms)", "{:.0f}"),
    ("ratio", "/ plain", "{:.2f}"),
    ("followed_after_steps", "Planned after (steps)", "{}"),
    ("predicted_ms", "Predicted (ms)", "{:.0f}"),
    ("out_gib", "Out a step (GiB)", "{:.1f}"),
    ("equal", "Bit-equal", "{}"),
]
WRITTEN: dict[str, bool | None] = {"default": None, "foreach=False": False}


def parse_arguments() -> argparse.Namespace:
    """The command line; by default the model state is 20 GiB, in 12."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", default="12GiB")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20, help="of each training; the last quarter is timed")
    parser.add_argument("--rounds", type=int, default=1, help="trainings of each kind within the limit, in turn")
    parser.add_argument("--tiny", action="store_true", help="small shapes on the CPU, to try it without a GPU")
    parser.add_argument("--output-dir", default="benchmarks/results")
    given = parser.parse_args()
    if given.tiny:
        given.device, given.limit, given.layers, given.hidden, given.tokens = "cpu", "100MiB", 4, 128, 32
        torch.set_num_threads(1)
    return given


def run(given: argparse.Namespace, written: str, *, limited: bool) -> dict[str, Any]:
    """One training, in an allocator without leftovers."""
    shape = GPTShape(
        layers=given.layers, hidden=given.hidden, heads=given.hidden // 128, tokens=given.tokens, vocabulary=32000
    )
    empty(given.device)
    if limited:
        torch_lms.enable({given.device: given.limit})
    row = train(shape, given.batch, given.steps, given.device, foreach=WRITTEN[written])
    torch_lms.disable()
    return row


def merge(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The last of several trainings, with the median time of the last quarter of all their steps."""
    times_ms = [time_ms for row in rows for time_ms in row["step_ms_all"][-max(1, len(row["step_ms_all"]) // 4) :]]
    return {
        **rows[-1],
        "step_ms": statistics.median(times_ms),
        "step_ms_all": [time_ms for row in rows for time_ms in row["step_ms_all"]],
        "peak_gib": max(row["peak_gib"] for row in rows),
        "reserved_gib": max(row.get("reserved_gib", 0.0) for row in rows),
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether losses and parameters are bit-equal."""
    return bool((one["losses"], one["digest"]) == (other["losses"], other["digest"]))


def main() -> None:
    """Trains with both ways to write AdamW, with and without the limit, and writes the table."""
    given = parse_arguments()
    make_deterministic()
    limit_gib = parse_bytes(given.limit) / GIB
    result = Result(
        name="optimizer_choice", title="AdamW as users write it, model state larger than the limit", columns=COLUMNS
    )
    if given.device == "cpu":
        torch_lms.swap.count_cpu_allocations()
    plain = {written: run(given, written, limited=False) for written in WRITTEN}
    for written, row in plain.items():
        result.add(mode="plain", optimizer=written, equal=True, **row)
        result.write(given.output_dir)
    rounds: dict[str, list[dict[str, Any]]] = {written: [] for written in WRITTEN}
    for _ in range(given.rounds):
        for written, rows in rounds.items():
            rows.append(run(given, written, limited=True))
    limited = {written: merge(rows) for written, rows in rounds.items()}
    for written, row in limited.items():
        equal = all(same(plain[written], one) for one in rounds[written])
        over = row["step_ms"] / plain[written]["step_ms"]
        result.add(mode=f"limit {given.limit}", optimizer=written, equal=equal, ratio=over, **row)
        if written == "default":
            target = f"<= {MOST_OVER_PLAIN}"
            result.check(f"{written}: step / plain", target, round(over, 3), ok=over <= MOST_OVER_PLAIN)
        result.check(f"{written}: losses and parameters bit-equal", "True", str(equal), ok=equal)
        peak_gib = max(row["peak_gib"], row["reserved_gib"])
        result.check(f"{written}: peak (GiB)", f"{limit_gib:.2f}", round(peak_gib, 3), ok=peak_gib <= limit_gib)
    ratio = limited["default"]["step_ms"] / limited["foreach=False"]["step_ms"]
    target = f"<= {MOST_OVER_SINGLE}"
    result.check("step, default / foreach=False", target, round(ratio, 3), ok=ratio <= MOST_OVER_SINGLE)
    print("default and foreach=False bit-equal without a limit:", same(plain["default"], plain["foreach=False"]))
    result.write(given.output_dir)


if __name__ == "__main__":
    main()
