"""Rows of a benchmark, each in a process of its own, in one file that is written after each of them.

A row that fails is a missed check, and the others go on. Rows of an earlier run stay until they are run again, so that
a benchmark can be run a few rows at a time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from benchmarks.equal_peak import compare
from benchmarks.fresh import CallFailedError, FreshProcesses
from benchmarks.plan_worker import Run, measure
from benchmarks.results import Check, Result, command, commit

__all__ = ["PRELOAD", "Row", "Sweep", "add_arguments", "run_rows"]

Row = dict[str, Any]
_SHORTEST_ROW_S = 10.0
PRELOAD = ("torch", "torch_lms", "benchmarks.plan_worker")


def add_arguments(parser: argparse.ArgumentParser, *, seconds: int) -> None:
    """The words that all of these benchmarks know.

    Args:
        parser: gets them.
        seconds: in which all rows end, unless the command says otherwise.
    """
    parser.add_argument("--tiny", action="store_true", help="small shapes on the CPU, to try it without a GPU")
    parser.add_argument("--only", default="*", help="keys of rows, comma-separated; * stands for anything")
    parser.add_argument("--list", action="store_true", help="print the rows' keys and end")
    parser.add_argument("--seconds", type=float, default=seconds, help="in which all rows end (%(default)s)")
    parser.add_argument("--row-seconds", type=float, default=100, help="that a row may take (%(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="that are timed (%(default)s)")
    parser.add_argument("--keep", action="store_true", help="write plans and traces beside the results, in plans/")
    parser.add_argument("--output-dir", default="benchmarks/results")


class Sweep:
    """Runs rows and keeps them.

    Args:
        result: the table.
        given: the command line, with the words of `add_arguments`.
        keys: of all rows, in their order in the table.
        judge: the checks of all rows that there are.
        preload: further modules that rows import.
        device: of the rows; by default the CPU for small shapes, and a GPU for others.
    """

    def __init__(
        self,
        result: Result,
        given: argparse.Namespace,
        keys: Sequence[str],
        judge: Callable[[Sequence[Row]], Iterable[Check]],
        preload: Sequence[str] = (),
        device: str | None = None,
    ) -> None:
        self.result = result
        self.given = given
        self.keys = list(keys)
        self.judge = judge
        self.device = device or ("cpu" if given.tiny else "cuda")
        self.began_s = time.monotonic()
        self.processes = FreshProcesses.for_device(self.device, [*PRELOAD, *preload])
        path = Path(given.output_dir) / f"{result.name}.json"
        if path.is_file():
            result.rows = json.loads(path.read_text())["rows"]

    def wants(self, key: str) -> bool:
        """Whether the command line names a row."""
        return any(fnmatchcase(key, pattern.strip()) for pattern in self.given.only.split(","))

    def row(self, key: str) -> Row | None:
        """A row that there is and that has not failed."""
        return next((row for row in self.result.rows if row["key"] == key and "error" not in row), None)

    @property
    def seconds_left(self) -> float:
        """Until all rows have to have ended."""
        return float(self.given.seconds) - (time.monotonic() - self.began_s)

    @property
    def out_of_time(self) -> bool:
        """Whether no further row may begin."""
        return self.seconds_left < _SHORTEST_ROW_S

    def attempt(self, key: str, run: Run, seconds: float | None = None) -> Row:
        """Runs something; its row, or one with its error.

        Args:
            key: of the row; names the files of its plan.
            run: what.
            seconds: that it may take, if not those of the command line.
        """
        if self.out_of_time:
            return {"error": f"not run: {self.given.seconds:.0f} s were nearly over"}
        began_s = time.monotonic()
        keep = str(Path(self.given.output_dir) / "plans" / f"{self.result.name}-{key}") if self.given.keep else ""
        try:
            most_s = min(seconds or self.given.row_seconds, self.seconds_left)
            row = self.processes.call(measure, replace(run, keep=keep), seconds=most_s)
        except CallFailedError as error:
            row = {"error": str(error), **error.news}
        return {**row, "took_s": time.monotonic() - began_s}

    def run(
        self, key: str, mode: str, run: Run, *, against: str = "", seconds: float | None = None, **facts: Any
    ) -> Row | None:
        """Runs a row and keeps it.

        Args:
            key: of the row.
            mode: what it is called in the table.
            run: what it does.
            against: the key of the row without a limit, with which it is compared.
            seconds: that it may take, if not those of the command line.
            facts: further columns.

        Returns:
            The row; None if it failed.
        """
        print(f"--- {key}: {mode}", flush=True)
        if self.out_of_time and self.row(key) is not None:
            return self.row(key)
        row = {"key": key, "mode": mode, **facts, "device": run.device, **self.attempt(key, run, seconds)}
        if against and "error" not in row:
            row |= compare(row, row if key == against else self.row(against))
        self.put(row)
        return self.row(key)

    def put(self, row: Row) -> None:
        """Keeps a row in place of the one with its key, and writes the file."""
        row = {**row, "command": command(), "commit": commit()}
        others = [other for other in self.result.rows if other["key"] != row["key"]]
        self.result.rows = sorted([*others, row], key=self._place)
        print(json.dumps(row), flush=True)
        self.write()

    def write(self) -> None:
        """Writes the file, with the checks of the rows that there are."""
        failed = [row for row in self.result.rows if "error" in row]
        self.result.checks = [
            *(Check(what=f"{row['mode']} ran", target="True", measured=row["error"][:300], ok=False) for row in failed),
            *(
                Check(what=f"{row['mode']}: its process ended with", target="0", measured=row["exit_status"], ok=False)
                for row in self.result.rows
                if row.get("exit_status", 0) != 0
            ),
            *self.judge([row for row in self.result.rows if "error" not in row]),
        ]
        self.result.write(self.given.output_dir)

    def finish(self) -> None:
        """Writes the file and prints the checks."""
        self.write()
        for check in self.result.checks:
            print(check, flush=True)

    def _place(self, row: Row) -> int:
        return self.keys.index(row["key"]) if row["key"] in self.keys else len(self.keys)


def run_rows(
    result: Result,
    given: argparse.Namespace,
    keys: Sequence[str],
    judge: Callable[[Sequence[Row]], Iterable[Check]],
    measure_row: Callable[[Sweep, str], object],
) -> None:
    """Runs the rows that the command line names, one after the other, or prints what rows there are.

    Args:
        result: the table.
        given: the command line, with the words of `add_arguments`.
        keys: of all rows, in their order in the table.
        judge: the checks of all rows that there are.
        measure_row: runs one row.
    """
    if given.list:
        print("\n".join(keys))
        return
    sweep = Sweep(result, given, keys, judge)
    for key in sweep.keys:
        if sweep.wants(key):
            measure_row(sweep, key)
    sweep.finish()
