"""How long planning takes, and how close plans come to the linear program's bound, on synthetic models.

The traces are from formulas (``tests/plan``), so this runs anywhere. Limits are shares of the plain peak. Times are
those of the processor, since others may use the machine; planning has one thread. As in the planner's process, Python
does not look for cycles among its objects meanwhile.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable

from benchmarks.results import Result
from tests.plan.large_traces import encoder_decoder_trace, experts_trace
from tests.plan.traces import gpt_trace
from torch_lms.plan import Trace, make_plan, simulate

GIB = 2**30
MODELS: dict[str, Callable[[], Trace]] = {
    "GPT, 24 layers": lambda: gpt_trace(layers=24),
    "GPT, 360 layers": lambda: gpt_trace(layers=360),
    "Encoder and decoder, 24 layers each": lambda: encoder_decoder_trace(layers=24),
    "Encoder and decoder, 58 layers each": lambda: encoder_decoder_trace(layers=58),
    "Mixture of experts, 28 layers": lambda: experts_trace(layers=28),
    "Mixture of experts, 36 layers": lambda: experts_trace(layers=36),
}
SHARES = (0.6, 0.4, 0.25)
TARGET_S = 5.0
TARGET_STORAGES = 10_000
TARGET_RATIO = 1.02
COLUMNS = [
    ("model", "Model", "{}"),
    ("ops", "Ops", "{}"),
    ("storages", "Storages", "{}"),
    ("share", "Limit / plain peak", "{:.2f}"),
    ("limit_gib", "Limit (GiB)", "{:.1f}"),
    ("ratio", "Step / plain", "{:.3f}"),
    ("bound", "Bound / plain", "{:.3f}"),
    ("over_bound", "Step / bound", "{:.4f}"),
    ("peak", "Peak / limit", "{:.4f}"),
    ("method", "Method", "{}"),
    ("planned_s", "Planned in (CPU s)", "{:.2f}"),
    ("simulated_s", "Simulated in (CPU s)", "{:.3f}"),
]


def add_limit(result: Result, model: str, trace: Trace, share: float) -> None:
    """One row: one limit for one model."""
    plain = simulate(trace, [])
    limit_bytes = int(plain.peak_bytes * share)
    begin = time.process_time()
    plan = make_plan(trace, limit_bytes)
    planned_s = time.process_time() - begin
    begin = time.process_time()
    simulate(trace, plan.decisions, limit_bytes)
    simulated_s = time.process_time() - begin
    known = plan.predicted
    result.add(
        model=model,
        ops=len(trace.ops),
        storages=len(trace.storages),
        share=share,
        limit_gib=limit_bytes / GIB,
        ratio=known.step_us / known.plain_us,
        bound=known.lower_bound_us / known.plain_us,
        over_bound=known.step_us / known.lower_bound_us,
        peak=known.peak_bytes / limit_bytes,
        method=plan.method,
        planned_s=planned_s,
        simulated_s=simulated_s,
        methods={one.name: one.step_us or one.note for one in plan.methods},
    )
    what = f"{model}, {share:.2f} of the plain peak"
    ratio = known.step_us / known.lower_bound_us
    result.check(f"{what}, step over bound", f"{TARGET_RATIO}", ratio, ratio <= TARGET_RATIO)
    if len(trace.storages) >= TARGET_STORAGES:
        result.check(f"{what}, planned in", f"{TARGET_S} CPU s", planned_s, planned_s <= TARGET_S)


def main() -> None:
    """Fills the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="benchmarks/results")
    given = parser.parse_args()
    gc.disable()
    result = Result(name="plan_speed", title="Planning synthetic models", columns=COLUMNS)
    for model, make in MODELS.items():
        trace = make()
        for share in SHARES:
            add_limit(result, model, trace, share)
    result.write(given.output)


if __name__ == "__main__":
    main()
