"""Runs a program that a benchmark builds or measures."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["run"]


def run(*command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a command and keeps what it says; if it fails that is shown, and the benchmark ends.

    Args:
        command: the program and its words.
        variables: set in its environment besides those of this process.
    """
    words = [str(part) for part in command]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **variables})
    if done.returncode != 0:
        said = f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
        sys.exit(f"expected {words[0]} to pass, found status {done.returncode}:\n{said}")
    return done
