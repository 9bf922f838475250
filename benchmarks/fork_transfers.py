"""The fork on a GPU: the tests of its CUDA device, and its transfers against plain copies of the same bytes.

Runs the programs that ``build_scripts/build_c10.sh TREE --kit FOLDER`` has made of the patched libc10 and libc10_cuda.

    python3 -m benchmarks.fork_transfers --kit build/kit
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from benchmarks.programs import run
from benchmarks.results import Result
from benchmarks.transfer_sizes import MIB, ONE_WAY, SIZES

FROM_BYTES, LEAST_RATIO = 16 * MIB, 0.95


def run_kit(kit: Path, program: str, *words: int) -> list[str]:
    """The lines that a program of the kit says."""
    return run(kit / program, *map(str, words), LD_LIBRARY_PATH=str(kit)).stdout.splitlines()


def measure(kit: Path, nbytes: int, count: int, rounds: int) -> dict[str, object]:
    """A size's row: medians of the rounds."""
    lines = run_kit(kit, "cuda_transfer_rate", nbytes, count, rounds)
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
        columns=ONE_WAY,
    )
    passed = [line for line in run_kit(given.kit.resolve(), "cuda_device_test") if " ... " in line]
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
