"""The fork's tests of its interface, counted file by file.

``python3 -m benchmarks.fork_tests`` in an environment with the fork's CPU wheel, pytest and hypothesis.
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

from benchmarks.results import Result

# With the options that each says at its top.
FILES = {
    "test_fork_api": ["-o", "pythonpath="],
    "test_fork_python_layer": [],
    "test_fork_python_errors": [],
    "test_random_pageouts": [],
}
COLUMNS = [
    ("file", "File", "{}"),
    ("tests", "Tests", "{}"),
    ("passed", "Passed", "{}"),
    ("failed", "Failed", "{}"),
    ("skipped", "Skipped", "{}"),
]


def run(name: str, report: Path) -> dict[str, object]:
    """A file's row; what pytest says goes to the terminal."""
    env = {**os.environ, "TORCH_SWAP_CPU": "1"}
    env.pop("PYTHONPATH", None)
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", f"--junit-xml={report}", *FILES[name]]
    done = subprocess.run([sys.executable, "-m", "pytest", *options, f"tests/fork/{name}.py"], env=env)
    if not report.exists():
        sys.exit(f"expected a report of tests/fork/{name}.py, found none: pytest ended with status {done.returncode}")
    outcomes: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        found = {child.tag for child in case}
        outcomes["failed" if found & {"failure", "error"} else "skipped" if "skipped" in found else "passed"] += 1
    counts = {outcome: outcomes[outcome] for outcome in ("passed", "failed", "skipped")}
    return {"file": name, "tests": sum(outcomes.values()), **counts}


def main() -> None:
    """Runs all files and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", default="benchmarks/results")
    given = parser.parse_args()
    result = Result(name="fork_tests", title="The fork's own tests on its CPU wheel, v1.13.1", columns=COLUMNS)
    with tempfile.TemporaryDirectory() as folder:
        for name in FILES:
            result.add(**run(name, Path(folder) / f"{name}.xml"))
    failed = sum(row["failed"] for row in result.rows)
    result.check("failures", "0", failed, failed == 0)
    least = min(row["passed"] for row in result.rows)
    result.check("tests that pass, least of a file", "1", least, least >= 1)
    result.write(given.output_dir)


if __name__ == "__main__":
    main()
