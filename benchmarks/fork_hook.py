"""What the fork's hook costs a storage that has never been paged out: its size, an access's instructions and time.

Builds c10 and ``tests/fork/hook_cost.cpp`` from a source tree without and with the patches, counts instructions with
valgrind, and times short runs of both builds in turns, each of them first in every other round; medians count.

    python -m benchmarks.fork_hook --tree build/source/v1.13.1
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.programs import run
from benchmarks.results import Result

COLUMNS = [
    ("build", "Build", "{}"),
    ("storage_bytes", "sizeof(StorageImpl)", "{}"),
    ("data_instructions", "StorageImpl::data() (instructions)", "{:.1f}"),
    ("tensor_instructions", "TensorImpl::data_ptr_impl() (instructions)", "{:.1f}"),
    ("data_ns", "StorageImpl::data() (ns)", "{:.2f}"),
    ("tensor_ns", "TensorImpl::data_ptr_impl() (ns)", "{:.2f}"),
]
FEW, MANY = 20_000, 120_000
TIMED, ROUNDS = 50_000_000, 21


def build(tree: Path, folder: Path) -> Path:
    """Compiles c10 and the program; returns the program."""
    launcher = ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
    release = ["-DCMAKE_BUILD_TYPE=Release", "-DONLY_COST=ON", *launcher]
    run("cmake", "-S", "tests/fork", "-B", folder, "-G", "Ninja", f"-DPYTORCH={tree.resolve()}", *release)
    run("ninja", "-C", folder, "-j", os.environ.get("MAX_JOBS", "2"), "hook_cost")
    return folder / "hook_cost"


def instructions(program: Path, what: str, times: int) -> int:
    """Instructions of a run that makes so many accesses."""
    said = run("valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", program, what, str(times)).stderr
    found = re.search(r"Collected\s*:\s*(\d+)", said)
    if found is None:
        sys.exit(f"expected valgrind to count instructions, found:\n{said[-2000:]}")
    return int(found.group(1))


def each(program: Path, what: str) -> float:
    """Instructions of one access, without those of the loop around it."""
    per_round = {
        kind: (instructions(program, kind, MANY) - instructions(program, kind, FEW)) / (MANY - FEW)
        for kind in (what, "nothing")
    }
    return per_round[what] - per_round["nothing"]


def rounds_ns(programs: Sequence[Path], what: str) -> list[list[float]]:
    """The time of one access in each build, with that of the loop around it: those of all rounds."""
    taken: list[list[float]] = [[] for _ in programs]
    for turn in range(ROUNDS):
        order = range(len(programs)) if turn % 2 == 0 else reversed(range(len(programs)))
        for place in order:
            taken[place].append(float(run(programs[place], what, str(TIMED)).stdout.split()[1]))
    return taken


def measure(result: Result, name: str, program: Path, **times_ns: float) -> None:
    """Adds a build's row."""
    result.add(
        build=name,
        storage_bytes=int(run(program, "sizeof").stdout.split()[1]),
        data_instructions=round(each(program, "data"), 2),
        tensor_instructions=round(each(program, "tensor"), 2),
        **times_ns,
    )


def main() -> None:
    """Measures both builds and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", type=Path, required=True, help="source of get_source.sh, v1.13.1")
    parser.add_argument("--build", type=Path, default=Path("build/fork_hook"))
    parser.add_argument("--output-dir", default="benchmarks/results")
    given = parser.parse_args()
    plain, patched = given.build / "upstream", given.build / "patched"
    for folder in (plain, patched):
        if not folder.exists():
            run("git", "clone", "--quiet", "--local", given.tree, folder)
            run("git", "-C", folder, "checkout", "--quiet", "--detach", "upstream")
    if not (patched / "c10/core/StoragePager.h").exists():
        run("bash", "build_scripts/apply_patches.sh", "v1.13.1", patched)
    result = Result(name="fork_hook", title="The fork's hook, v1.13.1, nothing paged out", columns=COLUMNS)
    builds = {"upstream": build(plain, given.build / "upstream-build")}
    builds["patched"] = build(patched, given.build / "patched-build")
    data_ns, tensor_ns = (rounds_ns(list(builds.values()), what) for what in ("data", "tensor"))
    for (name, program), data, tensor in zip(builds.items(), data_ns, tensor_ns, strict=True):
        measure(result, name, program, data_ns=statistics.median(data), tensor_ns=statistics.median(tensor))
    before, after = result.rows
    grown = after["storage_bytes"] - before["storage_bytes"]
    result.check("sizeof(StorageImpl) grows by one pointer", "8 bytes", grown, grown == 8)
    more = after["data_instructions"] - before["data_instructions"]
    result.check("StorageImpl::data(): load, test and branch", "at most 3 more", round(more, 1), round(more, 1) <= 3)
    longer = statistics.median(late - early for early, late in zip(*data_ns, strict=True))
    result.check("StorageImpl::data() takes longer", "at most 0.15 ns", round(longer, 3), longer <= 0.15)
    print(result.write(given.output_dir))


if __name__ == "__main__":
    main()
