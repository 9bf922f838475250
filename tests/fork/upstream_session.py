"""Runs one of PyTorch's own test files in this process, and writes down what becomes of each test as it happens.

    python upstream_session.py FILE JOURNAL [--random-pageouts SEED] [--only NAME] [--share I/N] [--test ID]

The journal has a line of JSON for the beginning and one for the end of each test. Tests that are in it already are left
out, so that a run that was interrupted, or that a test has brought down, goes on behind it. ``upstream_tests.py`` does
all this for several files, and compares.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import pytest

ENDED = ("passed", "failed", "skipped", "xfailed", "crashed", "hung")
_TEXT_CHARACTERS = 4000


class Journal:
    """The plugin that writes; in the mode with page-outs it also sets their seed before each test."""

    def __init__(self, path: Path, seed: int | None, share: tuple[int, int], test: str | None) -> None:
        self._share = share
        self._test = test
        self._known = {line["test"] for line in read(path) if line["outcome"] in ENDED}
        self._file = path.open("a")
        self._seed = seed
        self._outcome: dict[str, Any] = {}
        self._before: dict[str, int] = {}

    @pytest.hookimpl(trylast=True)  # behind --only
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        first, step = self._share
        mine = {item.nodeid for item in items[first::step] if self._test in (None, item.nodeid)}
        self._write(test="", outcome="collected", count=len(mine))
        mine -= self._known
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in mine])
        items[:] = [item for item in items if item.nodeid in mine]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(test=nodeid, outcome="begun")
        self._outcome = {"outcome": "passed", "started": time.monotonic()}
        if self._seed is not None:
            import random_pageouts

            random_pageouts.reseed(zlib.crc32(nodeid.encode()) + self._seed)
            self._before = random_pageouts.counts()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._outcome.update(outcome="failed", text=str(report.longrepr)[-_TEXT_CHARACTERS:])
        elif report.skipped and self._outcome["outcome"] != "failed":
            self._outcome["outcome"] = "xfailed" if hasattr(report, "wasxfail") else "skipped"

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        seconds = time.monotonic() - self._outcome.pop("started")
        if self._seed is not None:
            import random_pageouts

            done = random_pageouts.counts()
            self._outcome["paging"] = {name: done[name] - self._before[name] for name in done}
        self._write(test=nodeid, seconds=round(seconds, 3), **self._outcome)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._write(test="", outcome="finished", status=int(exitstatus))

    def _write(self, **line: Any) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a journal; a last one that was cut off is left out."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines


def main() -> int:
    """Runs the tests; the status is pytest's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("journal", type=Path)
    parser.add_argument("--random-pageouts", type=int, metavar="SEED")
    parser.add_argument("--only", metavar="NAME", help="tests whose names match, as for pytest -k")
    parser.add_argument("--share", default="0/1", metavar="I/N", help="each N-th test, from the I-th on")
    parser.add_argument("--test", metavar="ID", help="this one alone")
    given = parser.parse_args()
    faulthandler.enable()
    if given.random_pageouts is not None:
        import random_pageouts

        random_pageouts.begin(given.random_pageouts)
    arguments = [given.file.name, "--noconftest", "--quiet", "--no-header", "--capture=sys", "--tb=native"]
    arguments += ["-p", "no:cacheprovider", "--disable-warnings", "--rootdir=.", "-c", os.devnull]
    arguments += ["-k", given.only] if given.only else []
    first, step = map(int, given.share.split("/"))
    journal = Journal(given.journal.resolve(), given.random_pageouts, (first, step), given.test)
    os.chdir(given.file.parent)
    sys.argv[1:] = []  # PyTorch's tests have arguments of their own
    return int(pytest.main(arguments, plugins=[journal]))


if __name__ == "__main__":
    sys.exit(main())
