"""GPT 1.3B forward and backward: unmodified under our limits, beside what a user would do instead to need less memory.

    python -m benchmarks.plans --only 'plain,ours-*'     # 5 minutes on an H200
    python -m benchmarks.plans --only 'plain,[csto]*' …  # the peers; --list shows all keys
    python -m benchmarks.plans --tiny --output-dir /tmp/out --only 'plain,ours-70'

Limits are GiB, or with ``--tiny`` percents of the plain run's peak.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from benchmarks import peers
from benchmarks.equal_peak import at_most, check_learning, check_peaks, check_rows
from benchmarks.plan_worker import Paging, Run
from benchmarks.results import Check, Result
from benchmarks.sweep import Row, Sweep, add_arguments
from benchmarks.training import GIB

COLUMNS = [
    ("mode", "Mode", "{}"),
    ("step_ms", "Step (ms)", "{:.0f}"),
    ("ratio", "/ plain", "{:.3f}"),
    ("peak_gib", "Peak (GiB)", "{:.1f}"),
    ("reserved_gib", "Reserved (GiB)", "{:.1f}"),
    ("fastest_peer", "Fastest peer within that", "{}"),
    ("over_peer", "/ peer", "{:.3f}"),
    ("predicted_ms", "Predicted (ms)", "{:.0f}"),
    ("predicted_peak_gib", "Predicted peak (GiB)", "{:.1f}"),
    ("out_gib", "Out a step (GiB)", "{:.1f}"),
    ("recomputed_gib", "Recomputed a step (GiB)", "{:.1f}"),
    ("followed_after_steps", "Planned after (steps)", "{}"),
    ("equal", "Bit-equal", "{}"),
]
LIMITS_GIB = (40, 30, 20, 16, 12, 9)
MOST_RATIO = {40: 1.04, 30: 1.08, 20: 1.14, 16: 1.18, 12: 1.22, 9: 1.35}
ALONE_GIB = (30, 16)
LIMITS_TINY = (80, 70, 60)
BUDGETS = (1.0, 0.7, 0.5, 0.3, 0.1, 0.0)
HOST_LIMIT = "100GiB"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A row that can be asked for.

    Attributes:
        mode: what it is called.
        change: what a peer does; None for plain and ours.
        limit: ours, in GiB, or percents with --tiny.
        options: of `Paging`.
        needs_cuda: whether it means nothing on a CPU.
        seconds: that it may take, if not the usual ones.
    """

    mode: str
    change: Any = None
    limit: int | None = None
    options: dict[str, bool] = field(default_factory=dict)
    needs_cuda: bool = False
    seconds: float | None = None

    @property
    def facts(self) -> Row:
        """Columns that are known beforehand."""
        found: Row = {"peer": self.change is not None}
        if self.limit is not None:
            plans = self.options.get("swap", True) or self.options.get("recompute", True)
            found |= {"limit": self.limit, "plans": plans, "on_demand": not plans, "monotone": not self.options}
        return found


def our_entries(limits: Sequence[int], *, tiny: bool) -> dict[str, Entry]:
    """Our rows, by key."""
    unit = "% of plain's peak" if tiny else " GiB"
    entries = {f"ours-{limit}": Entry(mode=f"ours, {limit}{unit}", limit=limit) for limit in limits}
    for limit in limits[1:2] if tiny else ALONE_GIB:
        for name, words, options in (
            ("swap", "swap only", {"recompute": False}),
            ("recompute", "recompute only", {"swap": False}),
            ("demand", "on demand, without plans", {"swap": False, "recompute": False}),
        ):
            key = f"ours-{limit}-{name}"
            entries[key] = Entry(mode=f"ours, {limit}{unit}, {words}", limit=limit, options=options)
    last = limits[1:2] if tiny else ALONE_GIB[-1:]
    for limit in last:
        options = {"expandable_segments": False}
        mode = f"ours, {limit}{unit}, fixed segments"
        entries[f"ours-{limit}-fixed"] = Entry(mode=mode, limit=limit, options=options, needs_cuda=True)
    return entries


def peer_entries() -> dict[str, Entry]:
    """The peers, by key."""
    blocks, selective, budget = peers.checkpoint_blocks, peers.checkpoint_selectively, peers.compile_with_budget
    kept = {"matmuls": "matmuls and attention", "half": "every second matmul and attention", "attention": "attention"}
    entries = {"checkpoint-1": Entry(mode="checkpoint every block", change=blocks)}
    for every, words in ((2, "2nd"), (4, "4th")):
        mode = f"checkpoint every {words} block"
        entries[f"checkpoint-{every}"] = Entry(mode=mode, change=partial(blocks, every=every))
    for keep in peers.KEPT_BY_SELECTION:
        mode = f"selective checkpoint, keeps {kept[keep]}"
        entries[f"selective-{keep}"] = Entry(mode=mode, change=partial(selective, keep=keep))
    entries["save_on_cpu"] = Entry(mode="save_on_cpu(pin_memory)", change=peers.save_on_cpu, needs_cuda=True)
    entries["trl"] = Entry(mode="TRL OffloadActivations", change=peers.offload_with_trl, needs_cuda=True)
    for share in BUDGETS:
        mode = f"torch.compile, activation_memory_budget {share:g}"
        entries[f"compiled-{share:g}"] = Entry(mode=mode, change=partial(budget, budget=share), seconds=240)
    return entries


def entries_of(given: argparse.Namespace) -> dict[str, Entry]:
    """All rows, by key, in the table's order."""
    limits = [int(limit) for limit in given.limits.split(",")] if given.limits else None
    ours = our_entries(limits or (LIMITS_TINY if given.tiny else LIMITS_GIB), tiny=given.tiny)
    return {"plain": Entry(mode="plain"), **ours, **peer_entries()}


def judge(rows: Sequence[Row]) -> Iterator[Check]:
    """The checks of the rows that there are; adds to ours the fastest peer."""
    yield from check_rows(rows)
    for row in rows:
        most = MOST_RATIO.get(row.get("limit", 0)) if row.get("monotone") and row["device"] != "cpu" else None
        if most is not None and "ratio" in row:
            yield at_most(f"{row['mode']}: / plain", row["ratio"], most)
    yield from check_learning(rows)
    yield from check_peaks(rows)


def run_of(entry: Entry, given: argparse.Namespace, limit_bytes: int) -> Run:
    """What a row does."""
    device = "cpu" if given.tiny else "cuda"
    run = Run(workload="gpt", device=device, tiny=given.tiny, change=entry.change, steps=given.steps)
    if entry.limit is None:
        return run
    host_limit = None if given.tiny else HOST_LIMIT
    return replace(run, paging=Paging(limit_bytes=limit_bytes, host_limit=host_limit, **entry.options))


def main() -> None:
    """Runs the rows that the command names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, seconds=560)
    parser.add_argument("--limits", default="", help="other limits than the table's, comma-separated")
    given = parser.parse_args()
    entries = entries_of(given)
    if given.list:
        print("\n".join(entries))
        return
    title = "GPT, tiny, on a CPU" if given.tiny else "GPT 1.3B, batch 16 x 2048, forward and backward, one GPU"
    sweep = Sweep(Result(name="plans", title=title, columns=COLUMNS), given, list(entries), judge)
    for key, entry in entries.items():
        if not sweep.wants(key):
            continue
        if entry.needs_cuda and given.tiny:
            print(f"--- {key}: left out, since it means nothing without CUDA", flush=True)
            continue
        measure_row(sweep, key, entry)
    sweep.finish()


def measure_row(sweep: Sweep, key: str, entry: Entry) -> None:
    """Runs a row, and compares it with plain's."""
    plain = sweep.row("plain")
    facts, limit_bytes = entry.facts, 0
    if entry.limit is not None:
        if sweep.given.tiny and plain is None:
            sweep.put({"key": key, "mode": entry.mode, "error": "the plain row is missing whose peak sets the limit"})
            return
        limit_bytes = plain["peak_bytes"] * entry.limit // 100 if sweep.given.tiny and plain else entry.limit * GIB
        facts |= {"limit_bytes": limit_bytes}
    run = run_of(entry, sweep.given, limit_bytes)
    sweep.run(key, entry.mode, run, seconds=entry.seconds, against="plain", **facts)


if __name__ == "__main__":
    main()
