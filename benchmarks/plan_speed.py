"""How long planning takes, and how close plans come to the linear program's bound, on synthetic GPTs.

The traces are from formulas (``tests/plan/traces.py``), so this runs anywhere. Limits are shares of the plain peak.
"""

from __future__ import annotations

import argparse
import time

from benchmarks.results import Result
from tests.plan.traces import gpt_trace
from torch_lms.plan import Trace, make_plan, simulate

GIB = 2**30
LAYERS = (24, 96, 360)
SHARES = (0.7, 0.53, 0.35, 0.28, 0.21, 0.16)
TARGET_S = 5.0
TARGET_STORAGES = 10_000
TARGET_RATIO = 1.02
COLUMNS = [
    ("layers", "Layers", "{}"),
    ("storages", "Storages", "{}"),
    ("share", "Limit / plain peak", "{:.2f}"),
    ("limit_gib", "Limit (GiB)", "{:.1f}"),
    ("ratio", "Step / plain", "{:.3f}"),
    ("bound", "Bound / plain", "{:.3f}"),
    ("peak", "Peak / limit", "{:.4f}"),
    ("method", "Method", "{}"),
    ("planned_s", "Planned in (s)", "{:.2f}"),
    ("simulated_s", "Simulated in (s)", "{:.3f}"),
]


def add_limit(result: Result, layers: int, trace: Trace, share: float) -> None:
    """One row: one limit for one model."""
    plain = simulate(trace, [])
    limit_bytes = int(plain.peak_bytes * share)
    begin = time.perf_counter()
    plan = make_plan(trace, limit_bytes)
    planned_s = time.perf_counter() - begin
    begin = time.perf_counter()
    simulate(trace, plan.decisions, limit_bytes)
    simulated_s = time.perf_counter() - begin
    known = plan.predicted
    result.add(
        layers=layers,
        storages=len(trace.storages),
        share=share,
        limit_gib=limit_bytes / GIB,
        ratio=known.step_us / known.plain_us,
        bound=known.lower_bound_us / known.plain_us,
        peak=known.peak_bytes / limit_bytes,
        method=plan.method,
        planned_s=planned_s,
        simulated_s=simulated_s,
        methods={one.name: one.step_us or one.note for one in plan.methods},
    )
    what = f"{layers} layers, {share:.2f} of the plain peak"
    ratio = known.step_us / known.lower_bound_us
    result.check(f"{what}, step over bound", f"{TARGET_RATIO}", ratio, ratio <= TARGET_RATIO)
    if len(trace.storages) >= TARGET_STORAGES:
        result.check(f"{what}, planned in", f"{TARGET_S} s", planned_s, planned_s <= TARGET_S)


def main() -> None:
    """Fills the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="benchmarks/results")
    given = parser.parse_args()
    result = Result(name="plan_speed", title="Planning synthetic GPTs", columns=COLUMNS)
    for layers in LAYERS:
        trace = gpt_trace(layers=layers)
        for share in SHARES:
            add_limit(result, layers, trace, share)
    result.write(given.output)


if __name__ == "__main__":
    main()
