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

COLUMNS = [*ONE_WAY, ("request_us", "Request (us)", "{:.1f}"), ("first_request_us", "First request (us)", "{:.1f}")]
LEAST_RATIO = 0.95
LEAST_RATIO_OUT = {1 * MIB: 0.8, 4 * MIB: 0.9}  # of smaller storages, which wait for each other's requests
MOST_REQUEST_US, FROM_COUNT = 8.0, 128  # of the calling thread; a mean of fewer storages would be that of the first


def run_kit(kit: Path, program: str, *words: int) -> list[str]:
    """The lines that a program of the kit says."""
    return run(kit / program, *map(str, words), LD_LIBRARY_PATH=str(kit)).stdout.splitlines()


def measure(kit: Path, nbytes: int, count: int, rounds: int) -> dict[str, object]:
    """A size's row: medians of the rounds."""
    lines = run_kit(kit, "cuda_transfer_rate", nbytes, count, rounds)
    seconds = [statistics.median(column) for column in zip(*(map(float, line.split()) for line in lines), strict=True)]
    plain_out, out, plain_in, back = (nbytes * count / one / 1e9 for one in seconds[:4])
    request_us, first_request_us = (one / count * 1e6 for one in seconds[4:])
    return {
        "size": f"{count} x {nbytes // MIB} MiB", "plain_out": plain_out, "out": out, "out_ratio": out / plain_out,
        "plain_in": plain_in, "in": back, "in_ratio": back / plain_in,
        "request_us": request_us, "first_request_us": first_request_us,
    }  # fmt: skip


def check(result: Result, row: dict[str, object], nbytes: int, count: int) -> None:
    """Holds a size's row against the targets."""
    for way, least in (("out", LEAST_RATIO_OUT.get(nbytes, LEAST_RATIO)), ("in", LEAST_RATIO)):
        ratio = row[f"{way}_ratio"]
        assert isinstance(ratio, float)
        result.check(f"{row['size']}: page-{way} over plain copies", str(least), round(ratio, 3), ratio >= least)
    if count < FROM_COUNT:
        return
    for key, name in (("request_us", "a page-out's request"), ("first_request_us", "a storage's first request")):
        taken_us = row[key]
        assert isinstance(taken_us, float)
        what = f"{row['size']}: {name} on the calling thread"
        result.check(what, f"at most {MOST_REQUEST_US:.0f} us", round(taken_us, 1), taken_us <= MOST_REQUEST_US)


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
    passed = [line for line in run_kit(given.kit.resolve(), "cuda_device_test") if " ... " in line]
    ok = bool(passed) and all(" ... ok" in line for line in passed)
    result.check("tests of the CUDA device pass", "all", f"{len(passed)} of {len(passed)}" if ok else "not all", ok)
    for nbytes, count in SIZES:
        row = measure(given.kit.resolve(), nbytes, count, given.rounds)
        result.add(**row)
        check(result, row, nbytes, count)
    result.write(given.output_dir)


if __name__ == "__main__":
    main()
