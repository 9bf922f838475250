"""What rows about plans are judged by: bits, limits, predictions, and the fastest peer that needs no more memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from benchmarks.results import Check
from benchmarks.training import GIB

__all__ = ["at_most", "check_learning", "check_peaks", "check_rows", "compare"]

Row = dict[str, Any]

_STEP_SHARE = 0.05
_PEAK_SHARE = 0.01
_BOUND_SHARE = 0.02
_PLAIN_STEPS_TO_LEARN = 2


def compare(row: Row, plain: Row | None) -> Row:
    """A row's ratio to plain's step, and whether its bits are plain's: yes, no, or that plain's own vary."""
    if plain is None:
        return {}
    found = {"ratio": row["step_ms"] / plain["step_ms"], "peak_share": row["peak_bytes"] / plain["peak_bytes"]}
    if not row["digest"]:
        return found
    losses = row["losses"] == plain["losses"][:1] * len(row["losses"])
    same = losses and row["digest"] == plain["digest"]
    repeats = plain["digest_before"] == plain["digest"] and len(set(plain["losses"])) == 1
    return {**found, "equal": "yes" if same else "no" if repeats else "no, nor is plain to itself"}


def check_rows(rows: Sequence[Row]) -> Iterator[Check]:
    """The checks of one program's rows; adds to ours the fastest peer that needs no more memory.

    Args:
        rows: that have not failed; of peers those with ``peer``, ours those with ``limit_bytes``.
    """
    for row in rows:
        if "digest_before" in row:
            repeats = compare(row, row)["equal"]
            yield Check(what=f"{row['mode']}: repeats itself", target="yes", measured=repeats, ok=repeats == "yes")
        if "limit_bytes" not in row:
            continue
        yield from _check_ours(row)
        peer = _fastest_within(rows, max(row["limit_bytes"], row["peak_bytes"]))
        if peer is not None and "ratio" in row:
            # Each has been measured beside a plain run of its own call.
            row["fastest_peer"], row["over_peer"] = peer["mode"], row["ratio"] / peer["ratio"]
            if row.get("monotone") and row["device"] != "cpu":
                yield at_most(f"{row['mode']}: / fastest peer within that", row["over_peer"], 1)


def at_most(what: str, measured: float, most: float) -> Check:
    """A ratio that should not be greater."""
    return Check(what=what, target=f"at most {most:g}", measured=round(measured, 4), ok=measured <= most)


def _fastest_within(rows: Iterable[Row], peak_bytes: int) -> Row | None:
    """The fastest of the peers whose peak is at most so much."""
    within = [row for row in rows if row.get("peer") and "ratio" in row and row["peak_bytes"] <= peak_bytes]
    return min(within, key=lambda row: float(row["ratio"]), default=None)


def _check_ours(row: Row) -> Iterator[Check]:
    """Its bits, its peak, and what its plan has predicted."""
    mode = row["mode"]
    if "equal" in row:
        yield Check(what=f"{mode}: bit-equal", target="yes", measured=row["equal"], ok=row["equal"] != "no")
    limit_gib = row["limit_bytes"] / GIB
    most_gib = max(row["most_gib"], row["reserved_gib"])
    yield Check(
        what=f"{mode}: peak within the limit",
        target=f"{limit_gib:.4g} GiB",
        measured=round(most_gib, 5),
        ok=most_gib <= limit_gib,
    )
    if row.get("plans"):
        found = "True" if row["followed"] else " ".join(row["refusals"])[:300] or f"planned: {row['planned']}"
        yield Check(what=f"{mode}: a plan is followed", target="True", measured=found, ok=row["followed"])
    if "predicted_ms" in row:
        if row["device"] != "cpu":  # whose times are of a machine that is shared
            yield _near(f"{mode}: step over predicted", row["step_ms"] / row["predicted_ms"], _STEP_SHARE)
        yield _near(f"{mode}: peak over predicted", row["peak_gib"] / row["predicted_peak_gib"], _PEAK_SHARE)
        yield at_most(f"{mode}: predicted step over bound", row["predicted_ms"] / row["bound_ms"], 1 + _BOUND_SHARE)


def check_learning(rows: Sequence[Row]) -> Iterator[Check]:
    """Steps before a plan over the same number of steps without plans under that limit, in plain steps."""
    plain = next((row for row in rows if "digest_before" in row), None)
    on_demand = {row["limit_bytes"]: row for row in rows if row.get("on_demand")}
    for row in rows:
        beside = on_demand.get(row.get("limit_bytes"))
        if plain is None or beside is None or not row.get("followed") or row["device"] == "cpu":
            continue
        learning_ms = row["learning_ms_all"]
        # The first steps of both make caches and host memory, too.
        same = [*beside["warmup_ms_all"], *beside["step_ms_all"], *([beside["step_ms"]] * len(learning_ms))]
        more = (sum(learning_ms) - sum(same[: len(learning_ms)])) / plain["step_ms"]
        yield at_most(f"{row['mode']}: learning beyond paging on demand, in plain steps", more, _PLAIN_STEPS_TO_LEARN)


def check_peaks(rows: Sequence[Row]) -> Iterator[Check]:
    """A lower limit gives no higher peak."""
    ours = sorted(
        (row["limit_bytes"], row["peak_bytes"]) for row in rows if row.get("followed") and row.get("monotone")
    )
    if len(ours) > 1:
        falls = all(low[1] <= high[1] for low, high in pairwise(ours))
        yield Check(what=f"peaks rise with {len(ours)} limits", target="True", measured=str(falls), ok=falls)


def _near(what: str, ratio: float, share: float) -> Check:
    return Check(what=what, target=f"1 ± {share}", measured=round(ratio, 4), ok=abs(ratio - 1) <= share)
