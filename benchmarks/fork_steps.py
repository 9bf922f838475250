"""Training steps of the fork's CPU build over those of PyTorch without it, where nothing has ever been paged out.

Both builds come from the same source with the same options (``build_scripts/build_wheel.sh``, one with
``--unpatched``). A process of each is alive, and one that repeats the unpatched build, to see what the machine's noise
is; they step in turns, in an order that changes.

It runs in an environment with the fork's wheel:

    python3 -m benchmarks.fork_steps --unpatched build/unpatched/bin/python
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.results import Result

WORKER = Path(__file__).with_name("fork_step_worker.py")
MODELS = {"resnet50": "ResNet-50, 4 images of 64 x 64", "gpt": "GPT, 8 layers, hidden 256, 4 x 64 tokens"}
COLUMNS = [
    ("model", "Step, one thread", "{}"),
    ("unpatched_ms", "Unpatched (ms)", "{:.1f}"),
    ("patched_ms", "Patched (ms)", "{:.1f}"),
    ("ratio", "Patched / unpatched", "{:.4f}"),
    ("noise", "Unpatched / unpatched", "{:.4f}"),
]
MOST = 1.01
WARMUP_STEPS = 3


class Worker:
    """A process that steps when it is told."""

    def __init__(self, python: str, model: str, patched: bool) -> None:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [python, str(WORKER), model], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        version, has_fork = self._read()
        if has_fork != str(patched):
            expected = "the fork" if patched else "PyTorch without the fork"
            sys.exit(f"expected {expected} in {python}, found torch {version}; install the other wheel there")

    def _read(self) -> list[str]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"expected a step from {self._process.args!r}, found that it ended; its error is above")
        return line.split()

    def step(self) -> tuple[float, str]:
        """Seconds, and the loss."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        seconds, loss = self._read()
        return float(seconds), loss

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()


def compare(result: Result, model: str, unpatched: str, patched: str, rounds: int) -> None:
    """A model's row: medians of the steps, and of the ratios of each round."""
    workers = [Worker(unpatched, model, False), Worker(unpatched, model, False), Worker(patched, model, True)]
    random.seed(0)
    kept: list[list[float]] = []
    equal = True
    for index in range(WARMUP_STEPS + rounds):
        steps = {place: workers[place].step() for place in random.sample(range(3), 3)}
        equal = equal and len({loss for _, loss in steps.values()}) == 1
        if index >= WARMUP_STEPS:
            kept.append([steps[place][0] for place in range(3)])
    for worker in workers:
        worker.close()
    one, again, fork = zip(*kept, strict=True)
    ratio = statistics.median(ours / plain for ours, plain in zip(fork, one, strict=True))
    result.add(
        model=MODELS[model],
        unpatched_ms=1e3 * statistics.median(one),
        patched_ms=1e3 * statistics.median(fork),
        ratio=ratio,
        noise=statistics.median(other / plain for other, plain in zip(again, one, strict=True)),
        least_ratio=min(fork) / min(one),
        least_noise=min(again) / min(one),
        rounds=rounds,
    )
    result.check(f"step of {MODELS[model]}: patched over unpatched", str(MOST), round(ratio, 4), ratio <= MOST)
    result.check(f"losses of {MODELS[model]} are equal", "True", str(equal), equal)


def main() -> None:
    """Compares both models and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unpatched", required=True, help="a Python with the unpatched wheel")
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--output-dir", default="benchmarks/results")
    given = parser.parse_args()
    result = Result(name="fork_steps", title="Training steps on the fork's CPU build, v1.13.1", columns=COLUMNS)
    for model in MODELS:
        compare(result, model, given.unpatched, sys.executable, given.rounds)
    result.write(given.output_dir)


if __name__ == "__main__":
    main()
