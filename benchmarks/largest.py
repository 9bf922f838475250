"""The largest batch, and the longest sequence, that trains under a memory limit: plain, checkpointed, and ours.

    python -m benchmarks.largest                                  # 8 minutes on an H200
    python -m benchmarks.largest --only 'gpt-batch-*'
    python -m benchmarks.largest --tiny --output-dir /tmp/out --only 'gpt-batch-*'

Every size that is tried runs in a process of its own for some steps; our largest runs once more, with its plan, for its
speed, and if that fails the next one does. What others may take is limited by PyTorch's allocator, ours by
`torch_lms.enable`. How many of an op's inputs are read where they are, on the host, is a column: what does not fit the
limit with the rest of its op is used so.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks import peers
from benchmarks.plan_worker import Paging, Run
from benchmarks.results import Check, Result
from benchmarks.size_search import search
from benchmarks.sweep import Row, Sweep, add_arguments
from benchmarks.training import GIB
from benchmarks.workloads import WORKLOADS

COLUMNS = [
    ("what", "What", "{}"),
    ("mode", "Mode", "{}"),
    ("largest", "Largest", "{}"),
    ("over_plain", "/ plain", "{:.2f}"),
    ("over_checkpoint", "/ checkpointed", "{:.2f}"),
    ("per_s", "Samples or tokens a second", "{:.0f}"),
    ("step_ms", "Step (ms)", "{:.0f}"),
    ("peak_gib", "Peak (GiB)", "{:.1f}"),
    ("host_served", "Read on the host (a step)", "{:.0f}"),
]
HOST_LIMIT = "100GiB"


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is made as large as possible.

    Attributes:
        workload: the program.
        size: the name of its size.
        starts: what is tried first: plain, checkpointed, ours.
        grain: sizes are multiples of it.
        changed: other sizes.
        tiny_start: what is tried first with --tiny.
        tiny_grain: likewise.
        at_least: what ours has to reach, as a multiple of another mode's.
    """

    workload: str
    size: str
    starts: Mapping[str, int]
    grain: int = 1
    changed: Mapping[str, int] = field(default_factory=dict)
    tiny_start: int = 4
    tiny_grain: int = 1
    at_least: Mapping[str, float]

    @property
    def title(self) -> str:
        """In words."""
        words = "longest sequence, batch 1" if self.size == "tokens" else "largest batch"
        return f"{WORKLOADS[self.workload].title}, {words}"


QUESTIONS = {
    "gpt-batch": Question(
        workload="gpt",
        size="batch",
        starts={"plain": 6, "checkpoint": 31, "ours": 45},
        at_least={"checkpoint": 1.4},
    ),
    "resnet-batch": Question(
        workload="resnet",
        size="batch",
        starts={"plain": 272, "checkpoint": 744, "ours": 1088},
        grain=8,
        at_least={"plain": 4.0},
    ),
    "unet3d-batch": Question(
        workload="unet3d",
        size="batch",
        starts={"plain": 9, "checkpoint": 14, "ours": 36},
        tiny_start=2,
        at_least={"plain": 4.0},
    ),
    "gpt-tokens": Question(
        workload="gpt",
        size="tokens",
        starts={"plain": 12288, "checkpoint": 64512, "ours": 91136},
        grain=1024,
        changed={"batch": 1},
        tiny_start=128,
        tiny_grain=32,
        at_least={"checkpoint": 1.4},
    ),
}
MODES = {"plain": "plain", "checkpoint": "checkpointed", "ours": "ours"}


class Search:
    """One mode of one question."""

    def __init__(self, sweep: Sweep, key: str, question: Question, mode: str, limit_bytes: int) -> None:
        self.sweep = sweep
        self.key = key
        self.question = question
        self.mode = mode
        self.limit_bytes = limit_bytes
        self.tried: list[Row] = []
        self.fitting: dict[int, Row] = {}
        self.end_s = time.monotonic() + sweep.given.search_seconds

    def run_of(self, size: int) -> Run:
        """A run of some size, under the limit."""
        tiny = self.sweep.given.tiny
        changed = {**({} if tiny else self.question.changed), self.question.size: size}
        run = Run(workload=self.question.workload, device=self.sweep.device, tiny=tiny, changed=changed)
        run = replace(run, with_digest=False)
        if self.mode == "ours":
            return replace(run, paging=Paging(limit_bytes=self.limit_bytes, host_limit=None if tiny else HOST_LIMIT))
        change = peers.checkpoint_all if self.mode == "checkpoint" else None
        return replace(run, change=change, cap_bytes=None if tiny else self.limit_bytes)

    def fits(self, size: int) -> bool:
        """Whether some steps run within the limit; nothing does once the search has had its time."""
        if time.monotonic() > self.end_s:
            return False
        run = replace(self.run_of(size), steps=2, warmup_steps=1, most_steps=0)  # it need not be planned
        row = self.sweep.attempt(f"{self.key}-{size}", run)
        why = str(row.get("error", ""))
        if not why and row["most_gib"] * GIB > self.limit_bytes:
            why = f"peak of {row['most_gib']:.4g} GiB"
        fits = not why
        self.fitting |= {size: row} if fits else {}
        self.tried.append({"size": size, "fits": fits, "why": why[:300], "took_s": row.get("took_s", 0.0)})
        print(f"    {size}: {'fits' if fits else 'does not fit'} {why[:160]}", flush=True)
        return fits

    def answer(self) -> Row:
        """The row."""
        tiny = self.sweep.given.tiny
        start = self.question.tiny_start if tiny else self.question.starts[self.mode]
        start = self.sweep.given.start or start
        search(self.fits, start=start, grain=self.question.tiny_grain if tiny else self.question.grain)
        row: Row = {"largest": 0, "tried": self.tried, "in_time": time.monotonic() <= self.end_s}
        for size in sorted(self.fitting, reverse=True):
            timed = self.fitting[size]
            if self.mode == "ours":
                timed = self.sweep.attempt(self.key, replace(self.run_of(size), steps=self.sweep.given.steps))
            if "error" not in timed:
                return {**row, **timed, "largest": size, "per_s": timed["samples_per_s"] * timed["tokens"]}
            row.setdefault("failed", []).append({"size": size, "why": timed["error"][:300]})
        return {**row, "error": f"no size fits: {self.tried[-1]['why']}"}


def judge(rows: Sequence[Row]) -> Iterator[Check]:
    """How far ours gets beyond the others; adds the ratios to the rows."""
    found = {row["key"]: row for row in rows}
    for name, question in QUESTIONS.items():
        for mode in MODES:
            row = found.get(f"{name}-{mode}")
            if row is None:
                continue
            for other in ("plain", "checkpoint"):
                if (beside := found.get(f"{name}-{other}")) is not None:
                    row[f"over_{other}"] = row["largest"] / beside["largest"]
        ours = found.get(f"{name}-ours", {})
        for other, least in question.at_least.items():
            if (ratio := ours.get(f"over_{other}")) is not None:
                what = f"{question.title}: ours / {MODES[other]}"
                yield Check(what=what, target=f"at least {least}", measured=round(ratio, 3), ok=ratio >= least)


def limit_of(sweep: Sweep, question: Question, tiny_share: float = 1.5) -> int:
    """The limit in bytes; with --tiny so many times what the first size takes."""
    if not sweep.given.tiny:
        return int(sweep.given.limit_gib * GIB)
    changed = {question.size: question.tiny_start}
    run = Run(workload=question.workload, device="cpu", tiny=True, changed=changed, steps=1, with_digest=False)
    row = sweep.attempt("limit", run)
    return int(row["peak_bytes"] * tiny_share)


def measure_row(sweep: Sweep, key: str) -> None:
    """Answers a question in one mode."""
    name, mode = key.rsplit("-", 1)
    question = QUESTIONS[name]
    print(f"--- {key}", flush=True)
    facts: dict[str, Any] = {"key": key, "what": question.title, "mode": MODES[mode], "device": sweep.device}
    try:
        limit_bytes = limit_of(sweep, question)
    except KeyError:
        sweep.put({**facts, "error": "the run that sets the limit failed"})
        return
    answer = Search(sweep, key, question, mode, limit_bytes).answer()
    sweep.put({**facts, "limit_gib": limit_bytes / GIB, **answer})


def main() -> None:
    """Answers the questions that the command names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, seconds=560)
    parser.add_argument("--limit-gib", type=float, default=24.0)
    parser.add_argument("--search-seconds", type=float, default=180, help="for one mode of a question (%(default)s)")
    parser.add_argument("--start", type=int, help="the size that is tried first, instead of each question's own")
    parser.set_defaults(row_seconds=150)  # the first step pins up to 100 GiB of the host's memory
    given = parser.parse_args()
    keys = [f"{name}-{mode}" for name in QUESTIONS for mode in MODES]
    if given.list:
        print("\n".join(keys))
        return
    limit = "a tiny limit, on a CPU" if given.tiny else f"{given.limit_gib:g} GiB, one GPU"
    sweep = Sweep(
        Result(name="largest", title=f"The most that trains within {limit}", columns=COLUMNS), given, keys, judge
    )
    for key in keys:
        if sweep.wants(key) and not sweep.out_of_time:
            measure_row(sweep, key)
    sweep.finish()


if __name__ == "__main__":
    main()
