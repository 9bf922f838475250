"""What it takes to walk the stack by rules that are kept, beside the runtime's unwinder: Note [Frames by rules].

    python -m benchmarks.stack_walk    # compiles three files; seconds

Both ways take turns in one process, under stacks of several depths.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path

from benchmarks.results import Result

CSRC = Path(__file__).parents[1] / "csrc"
SOURCES = (
    Path(__file__).with_suffix(".cpp"),
    *(CSRC / "extension/base" / f"{name}.cpp" for name in ("StackWalk", "UnwindRule")),
)
COLUMNS = [
    ("where", "Where", "{}"),
    ("frames", "Frames", "{}"),
    ("rules_us", "By rules (µs)", "{:.2f}"),
    ("unwinder_us", "By the unwinder (µs)", "{:.2f}"),
    ("ratio", "Ratio", "{:.2f}"),
]
AT_MOST = 0.1
WALKS = 2000
ROUNDS = 15


def build(folder: Path) -> ctypes.CDLL:
    """The library that walks, compiled into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "stack_walk.so"
    compiler = os.environ.get("CXX", "g++")
    flags = ["-std=c++17", "-O2", "-DNDEBUG", "-fPIC", "-shared", "-fvisibility=hidden", f"-I{CSRC}"]
    subprocess.run([compiler, *flags, *map(str, SOURCES), "-o", str(path)], check=True)
    library = ctypes.CDLL(str(path))
    for name in ("walk_by_rules_us", "walk_by_unwinder_us"):
        function = getattr(library, name)
        function.restype, function.argtypes = ctypes.c_double, (ctypes.c_int64, ctypes.POINTER(ctypes.c_int64))
    return library


def in_turns(library: ctypes.CDLL) -> dict[str, float | int]:
    """The medians of rounds in which both ways take turns."""
    ways = {"rules_us": library.walk_by_rules_us, "unwinder_us": library.walk_by_unwinder_us}
    frames = ctypes.c_int64()
    times: dict[str, list[float]] = {name: [] for name in ways}
    found = set()
    for _ in range(ROUNDS):
        for name, walk in ways.items():
            times[name].append(walk(WALKS, ctypes.byref(frames)))
            found.add(frames.value)
    if len(found) != 1:
        raise RuntimeError(f"expected both ways to find as many frames, found {sorted(found)}; one of them is wrong")
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratios = [a / b for a, b in zip(times["rules_us"], times["unwinder_us"], strict=True)]
    return {"frames": found.pop(), **medians, "ratio": statistics.median(ratios)}


def in_sorting(depth: int, walk: Callable[[], dict[str, float | int]]) -> dict[str, float | int]:
    """Under so many calls of the interpreter from C: each sorts by what another call finds."""
    if depth == 0:
        return walk()
    found: list[dict[str, float | int]] = []

    def key(_: int) -> int:
        found.append(in_sorting(depth - 1, walk))
        return 0

    sorted([0], key=key)
    return found[0]


def main() -> None:
    """Times both ways at several depths and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", default="benchmarks/results")
    given = parser.parse_args()
    library = build(Path("build") / "stack_walk")
    result = Result(
        name="stack_walk", title="A walk of the stack, by rules that are kept and by the unwinder", columns=COLUMNS
    )
    for depth in (0, 8, 32):
        where = f"under {depth} calls back to Python" if depth else "called by a program"
        result.add(where=where, **in_sorting(depth, lambda: in_turns(library)))
    worst = max(row["ratio"] for row in result.rows)
    result.check("by rules / by the unwinder", f"<= {AT_MOST}", round(worst, 3), ok=worst <= AT_MOST)
    result.write(given.output_dir)


if __name__ == "__main__":
    main()
