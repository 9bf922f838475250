"""The fork's tests of its interface, counted file by file.

``python3 -m benchmarks.fork_tests`` in an environment with a wheel of the fork, pytest and hypothesis. Main memory is
paged; with a CUDA wheel and a GPU, the GPU's alone (``fork_tests_cuda``).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import torch

from benchmarks.results import Result

# With the options that each says at its top.
FILES = {
    "test_fork_api": ["-o", "pythonpath="],
    "test_fork_python_layer": [],
    "test_fork_python_errors": [],
    "test_fork_python_bystanders": [],
    "test_fork_limit": [],
}
FILES_CPU = {**FILES, "test_random_pageouts": [], "../stages/test_giving_up": []}  # schedules that a profile has made
FILES_CUDA = {**FILES, "test_fork_cuda": ["-o", "pythonpath="]}
COLUMNS = [
    ("file", "File", "{}"),
    ("tests", "Tests", "{}"),
    ("passed", "Passed", "{}"),
    ("failed", "Failed", "{}"),
    ("skipped", "Skipped", "{}"),
]


def run(name: str, words: list[str], report: Path) -> dict[str, object]:
    """A file's row; what pytest says goes to the terminal."""
    env = {**os.environ, "TORCH_SWAP_CPU": "0" if torch.cuda.is_available() else "1"}
    env.pop("PYTHONPATH", None)
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", f"--junit-xml={report}", *words]
    done = subprocess.run([sys.executable, "-m", "pytest", *options, f"tests/fork/{name}.py"], env=env)
    if not report.exists():
        sys.exit(f"expected a report of tests/fork/{name}.py, found none: pytest ended with status {done.returncode}")
    outcomes: Counter[str] = Counter()
    failures = []
    for case in ElementTree.parse(report).iter("testcase"):
        found = {child.tag for child in case}
        outcome = "failed" if found & {"failure", "error"} else "skipped" if "skipped" in found else "passed"
        outcomes[outcome] += 1
        if outcome == "failed":
            failures.append(case.get("name"))
    counts = {outcome: outcomes[outcome] for outcome in ("passed", "failed", "skipped")}
    return {"file": Path(name).name, "tests": sum(outcomes.values()), **counts, "failures": failures}


def main() -> None:
    """Runs all files and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", default="benchmarks/results")
    given = parser.parse_args()
    cuda = torch.cuda.is_available()
    title = f"The fork's own tests, paging {'a GPU' if cuda else 'main memory'}, v1.13.1"
    result = Result(name="fork_tests_cuda" if cuda else "fork_tests", title=title, columns=COLUMNS)
    with tempfile.TemporaryDirectory() as folder:
        for name, words in (FILES_CUDA if cuda else FILES_CPU).items():
            result.add(**run(name, words, Path(folder) / f"{Path(name).name}.xml"))
    failed = sum(row["failed"] for row in result.rows)
    result.check("failures", "0", failed, failed == 0)
    least = min(row["passed"] for row in result.rows)
    result.check("tests that pass, least of a file", "1", least, least >= 1)
    result.write(given.output_dir)


if __name__ == "__main__":
    main()
