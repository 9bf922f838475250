"""The largest microbatch that trains on several devices with a cap: ours against torchgpipe's way.

    python -m benchmarks.pipeline_largest --cap-gib 16
    python -m benchmarks.pipeline_largest --device cpu --ranks 2 --most-rows 2 --output build/results

Every size that is tried is a torchrun of `pipeline_gpt`, which trains a step. torchgpipe's way is blocks balanced by
time under GPipe, each stage computed again as a whole; ours is 1F1B, cut by the planner, whose stages compute segments
again or swap where they have to. A CPU has no cap: there `--most-rows` ends the search.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from benchmarks.equal_peak import at_most
from benchmarks.pipeline_models import MODELS
from benchmarks.pipeline_rounds import make_parser, run_once, with_ranks
from benchmarks.results import Check, Result, commit
from benchmarks.size_search import search

Row = dict[str, Any]
WAYS = {"torchgpipe": ("gpipe", "torchgpipe"), "ours": ("1f1b", "automatic")}
AT_LEAST = 2.0
COLUMNS = [
    ("way", "Way", "{}"),
    ("rows", "Largest microbatch (rows)", "{}"),
    ("cap_gib", "Cap (GiB)", "{:.0f}"),
    ("step_ms", "Step (ms)", "{:.0f}"),
    ("rows_per_s", "Rows a second", "{:.1f}"),
    ("peak_gib", "Largest peak (GiB)", "{:.1f}"),
]


def largest(
    way: str,
    given: argparse.Namespace,
    run: Callable[..., Row] = run_once,
    note: Callable[[Row], None] = lambda _: None,
) -> Row:
    """The row of a way.

    Args:
        way: one of `WAYS`.
        given: the words of the command.
        run: trains one size; raises where that does not fit.
        note: gets the row after each size, with the largest that has fit so far.
    """
    schedule, split = WAYS[way]
    fitting: dict[int, Row] = {}
    tried: list[Row] = []
    facts: Row = {"key": way, "way": way, "cap_gib": given.cap_gib, "tried": tried, "commit": commit()}

    def row() -> Row:
        found = max(fitting, default=0)
        return {**facts, "rows": found, **(_figures(fitting[found], found, given) if found else {})}

    def fits(rows: int) -> bool:
        why = "more than was asked for" if rows > given.most_rows else ""
        try:
            fitting.update({} if why else {rows: run(given, schedule, split, _words(rows, given))})
        except RuntimeError as error:
            why = str(error)
        tried.append({"rows": rows, "fits": not why, "why": why[:600]})
        print(f"{way}, {rows} rows: {why[:300] or 'fits'}", flush=True)
        note(row())
        return not why

    search(fits, start=min(given.start_rows, given.most_rows), grain=1)
    return row()


def _figures(one: Row, rows: int, given: argparse.Namespace) -> Row:
    """Of the run of a size."""
    stages = sum(name.endswith("_nodes") for name in one)
    peaks = [peak for stage in range(stages) if (peak := one[f"stage{stage}_peak_gib"]) is not None]
    rate = 1e3 * rows * given.microbatches / one["step_ms"]
    more = {"recomputed": one["recomputed"], "swapped": one["swapped"], "peak_gib": max(peaks, default=None)}
    return {"step_ms": one["step_ms"], "rows_per_s": rate} | more


def _words(rows: int, given: argparse.Namespace) -> list[str]:
    words = ["--rows", str(rows), "--microbatches", str(given.microbatches)]
    return words if given.cap_gib is None else [*words, "--cap-gib", str(given.cap_gib)]


def parse_args() -> argparse.Namespace:
    """The words of the command."""
    parser = make_parser(__doc__, model="gpt_deep", steps=2, profile_runs=2)
    parser.add_argument("--only", choices=tuple(WAYS))
    parser.add_argument("--cap-gib", type=float)
    parser.add_argument("--start-rows", type=int, default=8)
    parser.add_argument("--most-rows", type=int, default=1 << 20)
    parser.add_argument("--microbatches", type=int, default=8)
    return with_ranks(parser.parse_args())


def main() -> None:
    """Both ways; the file is written after each size, and keeps the ways of earlier commands."""
    given = parse_args()
    shape = MODELS[given.model][given.device]
    title = f"{shape.name}, {given.microbatches} microbatches, on {given.ranks} devices"
    result = Result(name=f"pipeline_largest_{given.device}", title=title, columns=COLUMNS)
    kept = result.kept(given.output)

    def note(row: Row) -> None:
        kept[row["key"]] = row
        result.rows = list(kept.values())
        result.checks = list(judge(kept))
        result.write(given.output)

    for way in [given.only] if given.only else WAYS:
        largest(way, given, note=note)
    print(*result.checks, sep="\n")


def judge(found: dict[str, Row]) -> list[Check]:
    """How far ours gets beyond the other, where both are there."""
    if not all(found.get(way, {}).get("rows") for way in WAYS):
        return []
    share = found["torchgpipe"]["rows"] / found["ours"]["rows"]
    return [at_most("torchgpipe's largest microbatch over ours", share, 1 / AT_LEAST)]


if __name__ == "__main__":
    main()
