"""The fork on a GPU: the tests of its CUDA device, and its transfers against plain copies of the same bytes.

Runs the programs that ``build_scripts/build_c10.sh TREE --kit FOLDER`` has made of the patched libc10 and libc10_cuda.

    python3 -m benchmarks.fork_transfers --kit build/kit
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.results import Result

MIB = 1 << 20
SIZES = [(1 * MIB, 512), (4 * MIB, 256), (16 * MIB, 128), (64 * MIB, 32), (256 * MIB, 8), (1024 * MIB, 2)]
FROM_BYTES, LEAST_RATIO = 16 * MIB, 0.95
COLUMNS = [
    ("size", "Storages", "{}"),
    ("plain_out", "Plain copy out (GB/s)", "{:.1f}"),
    ("out", "Page-out (GB/s)", "{:.1f}"),
    ("out_ratio", "/ plain", "{:.2f}"),
    ("plain_in", "Plain copy in (GB/s)", "{:.1f}"),
    ("in", "Page-in (GB/s)", "{:.1f}"),
    ("in_ratio", "/ plain", "{:.2f}"),
]


def run(kit: Path, program: str, *words: object) -> str:
    """Runs a program of the kit; what it says is shown if it fails."""
    command = [str(kit / program), *map(str, words)]
    env = {**os.environ, "LD_LIBRARY_PATH": str(kit)}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode != 0:
        sys.exit(f"expected {program} to pass, found status {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def measure(kit: Path, nbytes: int, count: int, rounds: int) -> dict[str, object]:
    """A size's row: medians of the rounds."""
    lines = run(kit, "cuda_transfer_rate", nbytes, count, rounds).splitlines()
    seconds = [statistics.median(column) for column in zip(*(map(float, line.split()) for line in lines), strict=True)]
    plain_out, out, plain_in, back = (nbytes * count / one / 1e9 for one in seconds)
    return {
        "size": f"{count} x {nbytes // MIB} MiB", "plain_out": plain_out, "out": out, "out_ratio": out / plain_out,
        "plain_in": plain_in, "in": back, "in_ratio": back / plain_in,
    }  # fmt: skip


def main() -> None:
    """Tests, measures and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kit", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output-dir", default="benchmarks/results")
    given = parser.parse_args()
    result = Result(
        name="fork_transfers",
        title="The fork's transfers, v1.13.1, libc10 and libc10_cuda with CUDA 13.0",
        columns=COLUMNS,
    )
    passed = [line for line in run(given.kit.resolve(), "cuda_device_test").splitlines() if " ... " in line]
    ok = bool(passed) and all(" ... ok" in line for line in passed)
    result.check("tests of the CUDA device pass", "all", f"{len(passed)} of {len(passed)}" if ok else "not all", ok)
    for nbytes, count in SIZES:
        row = measure(given.kit.resolve(), nbytes, count, given.rounds)
        result.add(**row)
        if nbytes >= FROM_BYTES:
            for way in ("out", "in"):
                ratio = row[f"{way}_ratio"]
                assert isinstance(ratio, float)
                what = f"{row['size']}: page-{way} over plain copies"
                result.check(what, str(LEAST_RATIO), round(ratio, 3), ratio >= LEAST_RATIO)
    result.write(given.output_dir)


if __name__ == "__main__":
    main()
