"""GPT 1.3B forward and backward under a memory limit, against no limit and against peers.

Every mode runs in this one process on the same batch; losses and gradients must equal the plain run's.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

import torch

import torch_lms
from benchmarks import peers
from benchmarks.results import Result
from benchmarks.training import GIB, gradient_digest, make_deterministic
from torch_lms.cli.link import LinkRate, measure_link
from torch_lms.cli.models import GPT, GPTShape
from torch_lms.swap import parse_bytes

COLUMNS = [
    ("mode", "Mode", "{}"),
    ("step_ms", "Step (ms)", "{:.0f}"),
    ("peak_gib", "Peak (GiB)", "{:.1f}"),
    ("reserved_gib", "Reserved (GiB)", "{:.1f}"),
    ("out_gib", "Out a step (GiB)", "{:.1f}"),
    ("over_bytes", "Bytes / needed", "{:.2f}"),
    ("over_bound", "Step / link bound", "{:.2f}"),
    ("faults", "Faults", "{}"),
    ("prefetched", "Prefetched", "{}"),
    ("equal", "Bit-equal", "{}"),
]


class Harness:
    """One model and batch, run in one mode after another."""

    def __init__(self, shape: GPTShape, batch: int, steps: int) -> None:
        torch.manual_seed(0)
        with torch.device("cuda"):
            self.model = GPT(shape).to(torch.bfloat16)
            self.ids = torch.randint(shape.vocabulary, (batch, shape.tokens))
        self.steps = steps
        self.forward_out_bytes = 0
        self.forward_s = 0.0
        self.reference: tuple[float, str] | None = None

    def step(self, scope: Callable[[], AbstractContextManager[Any]]) -> float:
        """One forward and backward; returns the loss."""
        self.model.zero_grad(set_to_none=True)
        with scope():
            loss = self.model(self.ids, self.ids.roll(-1, 1))
        self.forward_s += time.perf_counter()
        self.forward_out_bytes += torch_lms.stats().pageout_bytes
        loss.backward()
        return float(loss.item())

    def run(self, mode: str, scope: Callable[[], AbstractContextManager[Any]] = nullcontext) -> dict[str, Any]:
        """Times a mode after three warm-up steps and compares its results with the first mode's."""
        gc.collect()
        torch.cuda.empty_cache()
        for _ in range(3):
            self.step(scope)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        torch_lms.stats(reset=True)
        times_ms = []
        self.forward_s = 0.0
        self.forward_out_bytes = 0
        for _ in range(self.steps):
            self.forward_out_bytes -= torch_lms.stats().pageout_bytes
            start = time.perf_counter()
            self.forward_s -= start
            loss = self.step(scope)
            torch.cuda.synchronize()
            times_ms.append(1e3 * (time.perf_counter() - start))
        counted = torch_lms.stats()
        row = {
            "mode": mode,
            "step_ms": statistics.median(times_ms),
            "step_ms_all": times_ms,
            "peak_gib": torch.cuda.max_memory_allocated() / GIB,
            "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
            "out_gib": counted.pageout_bytes / self.steps / GIB,
            "in_gib": counted.pagein_bytes / self.steps / GIB,
            "out_forward_gib": self.forward_out_bytes / self.steps / GIB,
            "forward_ms": 1e3 * self.forward_s / self.steps,
            "faults": counted.passive_pageins / self.steps,
            "prefetched": counted.prefetch_hits / self.steps,
            "host_served": counted.host_served,
            "cancelled": counted.cancelled_pageouts / self.steps,
            "retries": counted.allocation_retries / self.steps,
            "pagein_failures": counted.pagein_failures / self.steps,
            "wait_ms": counted.wait_us / 1e3 / self.steps,
        }
        results = (loss, gradient_digest(self.model))
        self.reference = self.reference or results
        row["loss_equal"] = results[0] == self.reference[0]
        row["equal"] = results == self.reference
        return row


def limited(harness: Harness, limit: str, args: argparse.Namespace, link: LinkRate, plain: dict[str, Any]) -> Any:
    """Our run under a limit, with the ratios that the targets are about."""
    torch_lms.enable(limit, host_limit=args.host_limit, expandable_segments=args.expandable)
    row = harness.run(f"torch_lms {limit}" + ("" if args.expandable else ", fixed segments"))
    torch_lms.disable()
    limit_gib = parse_bytes(limit) / GIB
    # Page-outs in forward and page-ins (all but a few in backward), at the measured rates.
    bound_ms = 1e3 * GIB * (row["out_forward_gib"] / link.to_host + row["in_gib"] / link.to_device)
    row["over_bytes"] = row["out_gib"] / (plain["peak_gib"] - limit_gib)
    row["over_bound"] = row["step_ms"] / max(bound_ms, 1e-9)
    row["limit_gib"] = limit_gib
    return row


def check_limited(result: Result, row: dict[str, Any]) -> None:
    """The targets of a limited run."""
    mode = row["mode"]
    peak = max(row["peak_gib"], row["reserved_gib"])
    result.check(
        f"{mode}: peak within the limit", f"{row['limit_gib']:.2f} GiB", round(peak, 3), peak <= row["limit_gib"]
    )
    result.check(f"{mode}: bit-equal", "True", str(row["equal"]), row["equal"])
    if row["limit_gib"] == 30:
        result.check(f"{mode}: bytes over needed", "1.10", round(row["over_bytes"], 3), row["over_bytes"] <= 1.10)
        result.check(f"{mode}: step over link bound", "1.15", round(row["over_bound"], 3), row["over_bound"] <= 1.15)


def run_peers(harness: Harness, result: Result, output_dir: str) -> None:
    """The peers, in this process; one that is missing or fails is a missed check."""
    for name, scope in (("save_on_cpu(pin_memory)", peers.save_on_cpu), ("TRL OffloadActivations", peers.trl_offload)):
        try:
            row = harness.run(name, scope)
        except Exception as error:  # a peer's failure is a result
            result.check(f"{name} ran", "True", f"{type(error).__name__}: {error}"[:300], ok=False)
            result.write(output_dir)
            continue
        result.add(**row)
        ours = [r for r in result.rows if "limit_gib" in r and r["peak_gib"] <= max(row["peak_gib"], 30)]
        for other in ours:
            ratio = other["step_ms"] / row["step_ms"]
            result.check(f"{other['mode']} step over {name}'s", "1.00", round(ratio, 3), ratio < 1)
        result.write(output_dir)


def main() -> None:
    """Runs the modes that the flags name and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limits", default="30GiB", help="comma-separated")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--host-limit", default="100GiB")
    parser.add_argument("--no-expandable", dest="expandable", action="store_false")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--name", default="gpt")
    parser.add_argument("--output-dir", default="benchmarks/results")
    args = parser.parse_args()
    result = Result(name=args.name, title="GPT 1.3B, batch 16 x 2048, forward and backward, one H200", columns=COLUMNS)
    make_deterministic()
    link = measure_link()
    print(link, flush=True)
    shape = GPTShape(layers=args.layers, hidden=2048, heads=16, tokens=2048, vocabulary=32000)
    harness = Harness(shape, batch=16, steps=args.steps)
    plain = harness.run("plain")
    result.add(**plain, link=asdict(link))
    result.check("plain again is bit-equal to plain", "True", str(again := harness.run("plain")["equal"]), ok=again)
    for limit in args.limits.split(","):
        try:
            row = limited(harness, limit, args, link, plain)
        except Exception as error:  # the other limits' figures are worth having
            traceback.print_exc()
            result.check(f"limit {limit} ran", "True", f"{type(error).__name__}: {error}"[:300], ok=False)
            torch_lms.disable()
        else:
            result.add(**row)
            check_limited(result, row)
        result.write(args.output_dir)
    if args.peers:
        run_peers(harness, result, args.output_dir)


if __name__ == "__main__":
    main()
