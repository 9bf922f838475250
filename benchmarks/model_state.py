"""A model whose parameters, gradients and optimizer state alone exceed the limit: it trains, with the same losses."""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import Any

import torch

import torch_lms
from benchmarks.results import Result
from benchmarks.training import GIB, digest, forget_workspace_setting, make_deterministic
from torch_lms._core import core
from torch_lms.cli.models import GPT, GPTShape
from torch_lms.memory_sizes import parse_bytes

SHARE_FOLLOWED = 0.9  # of a step's ops, if it goes by a plan
COLUMNS = [
    ("mode", "Mode", "{}"),
    ("state_gib", "Model state (GiB)", "{:.1f}"),
    ("peak_gib", "Peak (GiB)", "{:.1f}"),
    ("step_ms", "Step (ms)", "{:.0f}"),
    ("out_gib", "Out a step (GiB)", "{:.1f}"),
    ("equal", "Bit-equal", "{}"),
]


def train(shape: GPTShape, batch: int, steps: int, device: str, foreach: bool | None = False) -> dict[str, Any]:
    """Trains from a fixed seed; returns losses, a digest of the parameters, times and sizes.

    Args:
        shape: of the model.
        batch: sequences a step.
        steps: of the training.
        device: of the model.
        foreach: the optimizer's argument; None is what users write who do not write it.
    """
    torch_lms.stats(reset=True)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    with torch.device(device):
        model = GPT(shape)
        ids = torch.randint(shape.vocabulary, (batch, shape.tokens))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=foreach)
    losses, times_ms, followed = [], [], []
    for _ in range(steps):
        start = time.perf_counter()
        loss = model(ids, ids.roll(-1, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.item()))
        forget_workspace_setting()
        if device == "cuda":
            torch.cuda.synchronize()
        times_ms.append(1e3 * (time.perf_counter() - start))
        followed.append(torch_lms.current_plan() is not None and core.share_in_step() > SHARE_FOLLOWED)
    plan = torch_lms.current_plan()
    counted = torch_lms.stats()
    row = {
        "state_gib": 4 * sum(parameter.nbytes for parameter in model.parameters()) / GIB,
        "peak_gib": counted.peak_allocated_bytes / GIB,
        "step_ms": statistics.median(times_ms[1:] or times_ms),  # the first step makes the optimizer's state
        "step_ms_all": times_ms,
        "out_gib": counted.pageout_bytes / steps / GIB,
        "in_gib": counted.pagein_bytes / steps / GIB,
        "faults": counted.passive_pageins / steps,
        "prefetched": counted.prefetch_hits / steps,
        "host_served": counted.host_served,
        "wait_ms": counted.wait_us / 1e3 / steps,
        "followed_after_steps": followed.index(True) + 1 if any(followed) else None,
        "predicted_ms": plan.predicted.step_us / 1e3 if plan else None,
        "predicted_peak_gib": plan.predicted.peak_bytes / GIB if plan else None,
        "losses": losses,
    }
    if device == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
        row["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
    row["digest"] = digest(model.parameters())
    return row


def empty(device: str) -> None:
    """Gives back what the last run has left."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def main() -> None:
    """Trains with and without the limit and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", default="12GiB")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--output-dir", default="benchmarks/results")
    given = parser.parse_args()
    make_deterministic()
    result = Result(
        name="model_state", title="Model state larger than the limit: GPT in fp32 with AdamW", columns=COLUMNS
    )
    shape = GPTShape(
        layers=given.layers, hidden=given.hidden, heads=given.hidden // 128, tokens=given.tokens, vocabulary=32000
    )
    if given.device == "cpu":
        torch_lms.swap.count_cpu_allocations()
    limit_gib = parse_bytes(given.limit) / GIB
    plain = train(shape, given.batch, given.steps, given.device)
    result.add(mode="plain", equal=True, **plain)
    empty(given.device)
    torch_lms.enable({given.device: given.limit})
    row = train(shape, given.batch, given.steps, given.device)
    torch_lms.disable()
    equal = (plain["losses"], plain["digest"]) == (row["losses"], row["digest"])
    result.add(mode=f"limit {given.limit}", equal=equal, **row)
    state_gib = float(row["state_gib"])
    peak_gib = max(row["peak_gib"], row.get("reserved_gib", 0.0))
    result.check("model state over the limit", "1.0", round(state_gib / limit_gib, 2), ok=state_gib > limit_gib)
    result.check("losses and parameters bit-equal", "True", str(equal), ok=equal)
    result.check("peak (GiB)", f"{limit_gib:.2f}", round(peak_gib, 3), ok=peak_gib <= limit_gib)
    result.write(given.output_dir)


if __name__ == "__main__":
    main()
