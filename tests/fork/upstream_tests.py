"""PyTorch's own tests on the fork: first as they are, then with every storage paged out at random between ops.

    python -m tests.fork.upstream_tests --tree build/source/v1.13.1

There must be no failure that the plain run does not have. With ``--device cuda`` only the tests of that device run, and
storages of both devices are paged out. Needs a PyTorch with the fork's patches, and pytest,
expecttest, hypothesis and ninja beside it; ``build_scripts/upstream_tests.sh`` sees to that. What has been run is kept
in ``--work``, test by test: a run that was interrupted goes on where it was. A test that brings its process down, or
that says nothing for ``--test-limit`` seconds, counts as failed, and the run goes on behind it. One that fails only
with page-outs is run once more in both ways, alone in its process: what ran before it there may be the cause.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.results import Result
from tests.fork.upstream_session import ENDED, read

FILES = ("test_torch", "test_autograd", "test_nn")
MODES = ("plain", "paged out")
RESULTS = {
    "cpu": ("fork_upstream_tests", "PyTorch's own tests on the fork"),
    "cuda": ("fork_upstream_tests_cuda", "PyTorch's own tests of CUDA on the fork's lean CUDA wheel"),
}
BAD = {"failed", "crashed", "hung"}
# They compare how much of the device's memory is in use, which is what page-outs change.
COUNT_MEMORY = {
    "test_autograd.py::TestAutograd::test_graph_save_on_cpu_cuda",
    "test_autograd.py::TestAutogradDeviceTypeCUDA::test_free_unneeded_tensor_cuda",
}
PAGING = ("occasions", "pageouts", "pageout_bytes", "pageins", "passive_pageins", "prefetch_hits", "cancelled_pageouts")
COLUMNS = [
    ("file", "File", "{}"),
    ("mode", "Mode", "{}"),
    *((key, key.capitalize(), "{}") for key in ("tests", "passed", "failed", "skipped", "xfailed")),
    ("pageouts", "Page-outs", "{}"),
    ("pageins", "Page-ins", "{}"),
    ("seconds", "Time (s)", "{}"),
]
_LOG_CHARACTERS = 16_000  # a crash's stack and the error above it
_LOOK_EVERY_S = 2.0
_SHOW_EVERY_S = 30.0


@dataclass
class Run:
    """One file in one mode; or a share of its tests, or one of them alone."""

    name: str
    mode: str
    work: Path
    limit_s: float
    test_limit_s: float
    seed: int
    device: str = "cpu"
    share: tuple[int, int] = (0, 1)
    alone: str = ""

    @property
    def journal(self) -> Path:
        """What has become of each test."""
        part = f".{self.share[0]}of{self.share[1]}" if self.share[1] > 1 else ""
        part += f".{zlib.crc32(self.alone.encode()):08x}" if self.alone else ""
        return self.work / f"{self.name}.{self.device}.{self.mode.replace(' ', '_')}{part}.jsonl"

    def ended(self) -> dict[str, dict[str, Any]]:
        """The last line of each test that is over."""
        return {line["test"]: line for line in read(self.journal) if line["outcome"] in ENDED}

    def complete(self) -> bool:
        """Whether every test is over."""
        lines = read(self.journal)
        collected = [line["count"] for line in lines if line["outcome"] == "collected"]
        return any(line["outcome"] == "finished" for line in lines) and len(self.ended()) >= collected[-1]

    def go(self) -> bool:
        """Runs what has not been run yet; returns whether everything has."""
        deadline = time.monotonic() + self.limit_s
        while not self.complete() and time.monotonic() < deadline:
            before = len(self.ended())
            reason = self._session(deadline)
            if reason == "limit":
                break
            self._note_fallen(reason)
            if not self.complete() and len(self.ended()) == before:
                sys.exit(f"expected tests to run in {self.name}, found none that does; see {self._log}")
        self._show("done" if self.complete() else f"not over after {self.limit_s:.0f} s; run it again to go on")
        return self.complete()

    @property
    def _log(self) -> Path:
        return self.journal.with_suffix(".log")

    def _session(self, deadline: float) -> str:
        """A process that runs tests until it ends: by itself, or because it takes too long."""
        script = Path(__file__).with_name("upstream_session.py").resolve()
        command = [sys.executable, str(script), str(self.work / "test" / f"{self.name}.py"), str(self.journal)]
        command += ["--share", f"{self.share[0]}/{self.share[1]}"]
        command += ["--test", self.alone] if self.alone else []
        command += ["--random-pageouts", str(self.seed)] if self.mode != "plain" else []
        environment = {**os.environ, "TORCH_SWAP_CPU": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        if self.device == "cuda":
            command += ["--only", "CUDA"]
            environment["PYTORCH_TESTING_DEVICE_ONLY_FOR"] = "cuda"
        environment.pop("PYTHONPATH", None)  # the PyTorch that is installed
        with self._log.open("a") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
            )
            try:
                return self._watch(process, deadline)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()

    def _watch(self, process: subprocess.Popen[bytes], deadline: float) -> str:
        shown = changed = time.monotonic()
        size = 0
        while process.poll() is None:
            time.sleep(_LOOK_EVERY_S)
            now = time.monotonic()
            if self.journal.exists() and self.journal.stat().st_size != size:
                size, changed = self.journal.stat().st_size, now
            if now > deadline:
                return "limit"
            if now - changed > self.test_limit_s:
                return "hung"
            if now - shown > _SHOW_EVERY_S:
                self._show("")
                shown = now
        return "crashed"

    def _note_fallen(self, reason: str) -> None:
        """Writes down the test that was running when its process ended."""
        lines = [line for line in read(self.journal) if line["test"]]
        if lines and lines[-1]["outcome"] == "begun":
            text = self._log.read_text(errors="replace")[-_LOG_CHARACTERS:]
            with self.journal.open("a") as journal:
                journal.write(json.dumps({"test": lines[-1]["test"], "outcome": reason, "text": text}) + "\n")

    def _show(self, remark: str) -> None:
        collected = [line["count"] for line in read(self.journal) if line["outcome"] == "collected"]
        outcomes = Counter(line["outcome"] for line in self.ended().values())
        bad = sum(outcomes[outcome] for outcome in BAD)
        of = f" of {collected[-1]}" if collected else ""
        print(
            f"{self.name}, {self.mode}: {sum(outcomes.values())}{of} tests, {bad} failed {remark}".rstrip(), flush=True
        )


# --- what came out -----------------------------------------------------------------------------------


def ended(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """The last line of each test of several runs that is over."""
    return {test: line for run in runs for test, line in run.ended().items()}


def bad_tests(runs: Sequence[Run]) -> set[str]:
    """Names of the tests that failed, in any way."""
    return {name for name, line in ended(runs).items() if line["outcome"] in BAD}


def only_paged(plain: Sequence[Run], paged: Sequence[Run]) -> list[str]:
    """Tests that failed with page-outs alone, but for those that count memory."""
    return sorted(bad_tests(paged) - bad_tests(plain) - COUNT_MEMORY)


def add_row(result: Result, runs: Sequence[Run]) -> None:
    """Adds the counts of the runs of a file in one mode."""
    run, tests = runs[0], ended(runs)
    outcomes = Counter(line["outcome"] for line in tests.values())
    row: dict[str, Any] = {"file": run.name, "mode": run.mode, "tests": len(tests), "processes": len(runs)}
    row.update({outcome: outcomes[outcome] for outcome in ENDED})
    row["seconds"] = round(sum(line.get("seconds", 0.0) for line in tests.values()))
    if run.mode != "plain":
        paging = [line["paging"] for line in tests.values() if "paging" in line]
        row.update({name: sum(done[name] for done in paging) for name in PAGING})
        row["tests_with_pageouts"] = sum(done["pageouts"] > 0 for done in paging)
        row["seed"] = run.seed
    row["failures"] = sorted(bad_tests(runs))
    result.add(**row)


def compare(result: Result, plain: Sequence[Run], paged: Sequence[Run]) -> None:
    """Adds what must hold between the two modes of a file."""
    name, more = plain[0].name, []
    for test in only_paged(plain, paged):
        outcomes = [ended([replace(runs[0], share=(0, 1), alone=test)]) for runs in (plain, paged)]
        words = [outcome[test]["outcome"] if test in outcome else "not run" for outcome in outcomes]
        result.rows[-1].setdefault("alone", {})[test] = dict(zip(MODES, words, strict=True))
        if words[1] == "not run" or words[1] not in {words[0], "passed"}:
            more.append(test)
    what = f"{name}: tests that fail only when storages are paged out, also alone, but for those that count memory"
    result.check(what, "none", ", ".join(more) or "none", not more)
    same = set(ended(plain)) == set(ended(paged))
    result.check(f"{name}: the same tests have run in both modes", "yes", "yes" if same else "no", same)
    pageouts = sum(line.get("paging", {}).get("pageouts", 0) for line in ended(paged).values())
    result.check(f"{name}: storages have been paged out", "more than 1000", pageouts, pageouts > 1000)


def copy_tests(tree: Path, work: Path) -> None:
    """Copies the tests, which write beside themselves, away from the source."""
    if not (tree / "test" / "test_torch.py").exists():
        sys.exit(f"expected the source of PyTorch in {tree}, found no test/test_torch.py there; see get_source.sh")
    if not (work / "test").exists():
        shutil.copytree(tree / "test", work / "new", ignore=shutil.ignore_patterns("__pycache__"))
        (work / "new").rename(work / "test")


def main() -> int:
    """Runs both modes of every file, compares, and writes the result when everything has run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, required=True, help="source of PyTorch, of the version that is installed")
    parser.add_argument("--work", type=Path, default=Path("build/upstream_tests"), help="what has been run, and logs")
    parser.add_argument(
        "--files", nargs="+", default=FILES, choices=FILES, metavar="FILE", help="among " + " ".join(FILES)
    )
    parser.add_argument("--limit", type=float, default=5400.0, help="seconds for each file in each mode")
    parser.add_argument("--test-limit", type=float, default=600.0, help="seconds for one test")
    parser.add_argument("--processes", type=int, default=1, help="that share the tests of each file in each mode")
    parser.add_argument("--jobs", type=int, default=1, help="how many of these run at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="cuda: its tests alone")
    parser.add_argument("--output-dir", default="benchmarks/results")
    given = parser.parse_args()
    work = given.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    copy_tests(given.tree, work)
    limits = {"limit_s": given.limit, "test_limit_s": given.test_limit}
    runs = [
        Run(name, mode, work, seed=given.seed, device=given.device, **limits) for name in given.files for mode in MODES
    ]
    files = [[replace(run, share=(i, given.processes)) for i in range(given.processes)] for run in runs]
    with ThreadPoolExecutor(given.jobs) as pool:
        complete = list(pool.map(Run.go, [share for shares in files for share in shares]))
    name, title = RESULTS[given.device]
    result = Result(name=name, title=title, columns=COLUMNS)
    for plain, paged in zip(files[::2], files[1::2], strict=True):
        for test in only_paged(plain, paged) if all(complete) else ():
            complete += [replace(shares[0], share=(0, 1), alone=test).go() for shares in (plain, paged)]
        add_row(result, plain)
        add_row(result, paged)
        compare(result, plain, paged)
    if not all(complete):
        print("expected every test to have run, found some that have not; run it again: it goes on where it was")
        return 1
    print(result.write(given.output_dir))
    return 0 if all(check.ok for check in result.checks) else 1


if __name__ == "__main__":
    sys.exit(main())
