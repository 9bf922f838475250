"""Where a benchmark's figures go, with the command and the environment that made them."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

__all__ = ["Check", "Result", "command", "commit", "environment"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One target and what was measured."""

    what: str
    target: str
    measured: float | str
    ok: bool

    def __str__(self) -> str:
        """One line, which begins with MISSED if the target was missed."""
        return f"{'ok    ' if self.ok else 'MISSED'} {self.what}: {self.measured} (target {self.target})"


@dataclass(kw_only=True, slots=True)
class Result:
    """A benchmark's table and checks.

    Attributes:
        name: of the file.
        title: of the table.
        columns: key, heading and format of each column.
        rows: values by key.
        checks: the targets.
    """

    name: str
    title: str
    columns: list[tuple[str, str, str]]
    rows: list[dict[str, Any]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    def check(self, what: str, target: str, measured: float | str, ok: bool) -> None:
        """Records a target, and prints it."""
        self.checks.append(Check(what=what, target=target, measured=measured, ok=ok))
        print(self.checks[-1], flush=True)

    def add(self, **row: Any) -> None:
        """Adds a row, and prints it."""
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    def kept(self, directory: str | Path) -> dict[str, dict[str, Any]]:
        """The rows that an earlier command has written there, by their ``key``."""
        path = Path(directory) / f"{self.name}.json"
        return {row["key"]: row for row in json.loads(path.read_text())["rows"]} if path.is_file() else {}

    def write(self, directory: str | Path) -> Path:
        """Writes ``<name>.json`` and returns its path."""
        path = Path(directory) / f"{self.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {"command": command(), "environment": environment(), **asdict(self)}
        path.write_text(json.dumps(document, indent=1) + "\n")
        print(f"wrote {path.name}", flush=True)
        return path


def command() -> str:
    """The command that this process runs."""
    module = sys.modules["__main__"].__spec__
    name = ["-m", module.name] if module is not None else [Path(sys.argv[0]).name]
    ranks = os.environ.get("LOCAL_WORLD_SIZE")
    program = ["python3"] if ranks is None else ["torchrun", "--nproc-per-node", ranks]
    return shlex.join([*program, *name, *sys.argv[1:]])


@cache
def commit() -> str:
    """The commit that was checked out when this was asked first."""
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def environment() -> dict[str, Any]:
    """The machine and the versions that the figures depend on."""
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cpu_count": os.cpu_count(),
        "commit": commit(),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "gpu": properties.name,
            "gpu_count": torch.cuda.device_count(),
            "gpu_bytes": properties.total_memory,
            "driver": _driver(),
        }
    return facts


@cache
def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
