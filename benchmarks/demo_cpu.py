"""The demo without a GPU: how much less anonymous memory a GPT trains in at half of its tensors' memory."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.results import Result

GIB = 1 << 30
COLUMNS = [
    ("run", "Run", "{}"),
    ("step_s", "Step (s)", "{:.2f}"),
    ("peak_tensor_gib", "Peak of tensors (GiB)", "{:.2f}"),
    ("peak_anonymous_gib", "Peak anonymous memory (GiB)", "{:.2f}"),
    ("out_gib", "Out a step (GiB)", "{:.2f}"),
]


def train(arguments: list[str]) -> dict[str, Any]:
    """Runs the demo's command and returns what it has written."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.json"
        command = [sys.executable, "-m", "torch_lms", "train", "--device", "cpu", "--json", str(path), *arguments]
        subprocess.run(command, check=True)
        document: dict[str, Any] = json.loads(path.read_text())
        return document


def row_of(name: str, run: dict[str, Any]) -> dict[str, Any]:
    """One run's figures; the first step warms up."""
    seconds = sorted(step["seconds"] for step in run["steps"][1:] or run["steps"])
    return {
        "run": name,
        "step_s": seconds[len(seconds) // 2],
        "peak_tensor_gib": run["peak_tensor_bytes"] / GIB,
        "peak_anonymous_gib": run["peak_anonymous_bytes"] / GIB,
        "out_gib": run["stats"]["pageout_bytes"] / GIB / len(run["steps"]),
    }


def main() -> None:
    """Runs the demo and writes its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", default="benchmarks/results")
    given, rest = parser.parse_known_args()
    result = Result(name="demo_cpu", title="The demo: a GPT on a CPU, in half of its tensors' memory", columns=COLUMNS)
    document = train(["--model", "gpt", "--limit", "50%", *rest])
    plain, limited = (row_of(name, document["runs"][name]) for name in ("plain", "limited"))
    result.add(**plain)
    result.add(**limited)
    ratio = limited["peak_anonymous_gib"] / plain["peak_anonymous_gib"]
    result.check("anonymous memory over plain's", "0.60", round(ratio, 3), ok=ratio <= 0.60)
    for check in document["checks"]:
        result.check(check["what"], check["expected"], check["found"], ok=check["ok"])
    result.write(given.output_dir)


if __name__ == "__main__":
    main()
