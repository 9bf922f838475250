"""Training with a model state near or beyond the device's memory: GPTs in fp32 with AdamW, autocast, checkpointed.

    python -m benchmarks.large_state --only '6.7B-*'      # 4 minutes on an H200
    python -m benchmarks.large_state --only '12.9B-*'     # 4 minutes; 100 GiB of host memory
    python -m benchmarks.large_state --tiny --output-dir /tmp/out

Plain runs last and makes no fewer steps than ours did, so that all of its losses and its last parameters can be
compared. 12.9B has no plain run: its state alone is larger than the device.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks import peers
from benchmarks.equal_peak import at_most, check_rows
from benchmarks.plan_worker import Paging, Run
from benchmarks.results import Check, Result
from benchmarks.sweep import Row, Sweep, add_arguments, run_rows
from benchmarks.training import GIB

COLUMNS = [
    ("mode", "Mode", "{}"),
    ("state_gib", "Model state (GiB)", "{:.0f}"),
    ("step_ms", "Step (ms)", "{:.0f}"),
    ("ratio", "/ plain", "{:.2f}"),
    ("peak_gib", "Peak (GiB)", "{:.1f}"),
    ("out_gib", "Out a step (GiB)", "{:.1f}"),
    ("in_gib", "In a step (GiB)", "{:.1f}"),
    ("predicted_ms", "Predicted (ms)", "{:.0f}"),
    ("followed_after_steps", "Planned after (steps)", "{}"),
    ("equal", "Bit-equal", "{}"),
]
HOST_LIMIT = "100GiB"
TINY_SHARE = 0.6


@dataclass(frozen=True, kw_only=True)
class Model:
    """A GPT and its limit.

    Attributes:
        sizes: of the workload.
        limit_gib: ours.
        most_ms: that a step under it may take.
        plain: whether it runs without a limit.
    """

    sizes: Mapping[str, int]
    limit_gib: int
    most_ms: float
    plain: bool = True


MODELS = {
    "6.7B": Model(sizes={"layers": 32, "hidden": 4096, "heads": 32, "batch": 8}, limit_gib=60, most_ms=2200),
    "12.9B": Model(
        sizes={"layers": 40, "hidden": 5120, "heads": 40, "batch": 8}, limit_gib=125, most_ms=4200, plain=False
    ),
}


def keys_of(*, tiny: bool) -> list[str]:
    """Ours before plain, which makes as many steps."""
    return [
        f"{name}-{mode}"
        for name, model in MODELS.items()
        for mode in ("ours", "plain")
        if mode == "ours" or model.plain or tiny
    ]


def state_gib(sizes: Mapping[str, int]) -> float:
    """Parameters, gradients and the optimizer's two states, in GiB; blocks and embeddings."""
    hidden = sizes["hidden"]
    weights = 12 * sizes["layers"] * hidden**2 + 2 * sizes.get("vocabulary", 32000) * hidden
    return 4 * 4 * weights / GIB


def compare_steps(ours: Row, plain: Row | None) -> Row:
    """Ours beside plain: the same losses at every step, the same parameters after the last if plain has noted them."""
    if plain is None:
        return {}
    steps = len(ours["losses"])
    found = {"ratio": ours["step_ms"] / plain["step_ms"], "peak_share": ours["peak_bytes"] / plain["peak_bytes"]}
    losses, digest = ours["losses"] == plain["losses"][:steps], plain["digests"].get(str(steps))
    if losses and digest is None:
        return found  # of another number of steps
    return {**found, "equal": "yes" if losses and ours["digest"] == digest else "no"}


def judge(rows: Sequence[Row]) -> Iterator[Check]:
    """The checks of each model's rows; adds to ours what plain says of it."""
    found = {row["key"]: row for row in rows}
    for name, model in MODELS.items():
        ours, plain = found.get(f"{name}-ours"), found.get(f"{name}-plain")
        if ours is None:
            continue
        ours |= compare_steps(ours, plain)
        yield from check_rows([ours])
        falling = ours["losses"][-1] < ours["losses"][0]
        yield Check(what=f"{name}: the loss falls", target="True", measured=str(falling), ok=falling)
        if ours["device"] != "cpu":
            yield at_most(f"{name}: step (ms)", ours["step_ms"], model.most_ms)


def measure_row(sweep: Sweep, key: str) -> None:
    """Trains a model in one way."""
    name, mode = key.rsplit("-", 1)
    model, given = MODELS[name], sweep.given
    run = Run(
        workload="gpt_autocast",
        device=sweep.device,
        tiny=given.tiny,
        changed={} if given.tiny else model.sizes,
        change=peers.checkpoint_blocks,
        optimizer=True,
        steps=given.steps,
        most_steps=given.most_steps,
        most_seconds=given.row_seconds / 2,
    )
    facts: Row = {"model": name, "state_gib": None if given.tiny else state_gib(model.sizes)}
    if mode == "plain":
        ours = sweep.row(f"{name}-ours")
        if ours is not None:
            steps = len(ours["losses"])
            run = replace(run, warmup_steps=steps - given.steps, digests_after=(steps,), least_steps=steps)
        sweep.run(key, f"GPT {name}, plain", run, **facts)
        return
    limit_bytes = model.limit_gib * GIB
    if given.tiny:
        plain = sweep.attempt(f"{key}-limit", replace(run, steps=2, with_digest=False))
        limit_bytes = int(plain["peak_bytes"] * TINY_SHARE)
    paging = Paging(limit_bytes=limit_bytes, host_limit=None if given.tiny else HOST_LIMIT)
    facts |= {"limit_bytes": limit_bytes, "plans": True, "monotone": True}
    sweep.run(key, f"GPT {name}, ours, {limit_bytes / GIB:.3g} GiB", replace(run, paging=paging), **facts)


def main() -> None:
    """Runs the rows that the command names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, seconds=540)
    parser.add_argument("--most-steps", type=int, default=12, help="to wait for a plan (%(default)s)")
    parser.set_defaults(row_seconds=200, steps=4)
    given = parser.parse_args()
    title = "GPTs in fp32 with AdamW, autocast to bf16, blocks checkpointed, 8 x 2048 tokens"
    run_rows(
        Result(name="large_state", title=title, columns=COLUMNS), given, keys_of(tiny=given.tiny), judge, measure_row
    )


if __name__ == "__main__":
    main()
