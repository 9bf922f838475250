"""The programs of tests/soak, for a few seconds each; `build_scripts/soak.sh` runs them longer, beside busy loops."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.unit.fresh_process import PACKAGE_ROOT, REPOSITORY

PROGRAMS = [
    ("two_threads", "--threads=2"),
    ("two_threads", "--threads=6"),
    ("server", "--threads=2"),
    ("server", "--threads=4"),
    ("server", "--threads=8"),
    ("raw_pointer", "--threads=1"),
    ("dynamic_compile", "--threads=1"),
    ("race_pageout", "--threads=8"),
]


def clean_environment() -> dict[str, str]:
    """This one, without chaos mode."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TORCH_LMS")}


@pytest.mark.slow
@pytest.mark.timeout(400)  # raw_pointer is compiled once
@pytest.mark.parametrize(("program", "threads"), PROGRAMS)
def test_program_passes(program: str, threads: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"tests.soak.{program}", threads, "--seconds=4"],
        env={**clean_environment(), "PYTHONPATH": str(PACKAGE_ROOT)},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=360,
        check=False,
    )
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout[-1000:]}{done.stderr[-3000:]}"
    assert done.stdout.startswith(f"{program}: passed:")
