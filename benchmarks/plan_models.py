"""Models as users have them, forward and backward: plain, within a share of plain's peak, and fully checkpointed.

    python -m benchmarks.plan_models --only 'llama-*,vit-*'   # a minute for each model on an H200
    python -m benchmarks.plan_models --tiny --output-dir /tmp/out --only 'llama-*'

Random weights, nothing is downloaded; most of the models need the transformers package.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks import peers
from benchmarks.equal_peak import check_rows
from benchmarks.plan_worker import Paging, Run
from benchmarks.results import Check, Result
from benchmarks.sweep import Row, Sweep, add_arguments
from benchmarks.workloads import WORKLOADS, sizes_of

COLUMNS = [
    ("model", "Model", "{}"),
    ("mode", "Mode", "{}"),
    ("step_ms", "Step (ms)", "{:.0f}"),
    ("ratio", "/ plain", "{:.3f}"),
    ("peak_gib", "Peak (GiB)", "{:.1f}"),
    ("peak_share", "/ plain", "{:.2f}"),
    ("over_peer", "Step / checkpointed step", "{:.3f}"),
    ("predicted_ms", "Predicted (ms)", "{:.0f}"),
    ("predicted_peak_gib", "Predicted peak (GiB)", "{:.1f}"),
    ("out_gib", "Out a step (GiB)", "{:.1f}"),
    ("recomputed_gib", "Recomputed a step (GiB)", "{:.1f}"),
    ("equal", "Bit-equal", "{}"),
]
MODELS = ("llama", "vit", "resnet", "t5", "qwen_moe", "whisper")
SHARES = (60, 40)
SHARES_TINY = (70, 60)
HOST_LIMIT = "100GiB"


def keys_of(*, tiny: bool) -> list[str]:
    """All rows; what ends in ``equal`` has checkpointing's peak as its limit, and must be asked for by that word."""
    kinds = ["plain", "checkpoint", *(str(share) for share in (SHARES_TINY if tiny else SHARES)), "equal"]
    return [f"{model}-{kind}" for model in MODELS for kind in kinds]


def judge(rows: Sequence[Row]) -> Iterator[Check]:
    """The checks of each model's rows."""
    for model in MODELS:
        yield from check_rows([row for row in rows if row["key"].startswith(f"{model}-")])


def measure_row(sweep: Sweep, key: str) -> None:
    """Runs a row, and compares it with plain's."""
    model, kind = key.rsplit("-", 1)
    given = sweep.given
    run = Run(workload=model, device=sweep.device, tiny=given.tiny, steps=given.steps)
    facts: Row = {"model": WORKLOADS[model].title, "sizes": sizes_of(model, tiny=given.tiny, changed={})}
    title = f"{WORKLOADS[model].title}: "
    if kind == "plain":
        sweep.run(key, f"{title}plain", run, against=key, peer=False, **facts)
        return
    plain, checkpointed = sweep.row(f"{model}-plain"), sweep.row(f"{model}-checkpoint")
    against = f"{model}-plain"
    if kind == "checkpoint":
        run = replace(run, change=peers.checkpoint_all)
        sweep.run(key, f"{title}checkpointed", run, against=against, peer=True, **facts)
    elif plain is None or (kind == "equal" and checkpointed is None):
        sweep.put({"key": key, "mode": f"{title}{kind}", "error": "the row is missing whose peak sets the limit"})
    else:
        limit_bytes, words = plain["peak_bytes"] * int(kind) // 100 if kind != "equal" else 0, f"{kind} % of plain's"
        if kind == "equal" and checkpointed is not None:
            limit_bytes, words = checkpointed["peak_bytes"], "checkpointing's"
        host_limit = None if given.tiny else HOST_LIMIT
        run = replace(run, paging=Paging(limit_bytes=limit_bytes, host_limit=host_limit))
        facts |= {"limit_bytes": limit_bytes, "plans": True, "monotone": True}
        sweep.run(key, f"{title}ours, {words} peak", run, against=against, peer=False, **facts)


def main() -> None:
    """Runs the rows that the command names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, seconds=540)
    given = parser.parse_args()
    keys = keys_of(tiny=given.tiny)
    if given.list:
        print("\n".join(keys))
        return
    title = "Models, tiny, on a CPU" if given.tiny else "Models, forward and backward, one GPU"
    result = Result(name="plan_models", title=title, columns=COLUMNS)
    sweep = Sweep(result, given, keys, judge, preload=["transformers"])
    for key in keys:
        if sweep.wants(key) and (not key.endswith("-equal") or "equal" in given.only):
            measure_row(sweep, key)
    sweep.finish()


if __name__ == "__main__":
    main()
