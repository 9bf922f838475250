"""Programs that run at the same time, each in an interpreter of its own, and are waited for one by one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import torch_lms

REPOSITORY = Path(__file__).parents[2]
PATHS = [str(Path(torch_lms.__file__).parents[1]), str(REPOSITORY)]
PATIENCE_S = 100


class NewInterpreters:
    """Starts all programs at once.

    Args:
        programs: the interpreter's arguments, by name.
        environments: what each has beyond this process's own; chaos mode is left out.
    """

    def __init__(
        self, programs: Mapping[str, list[str]], environments: Mapping[str, dict[str, str]] | None = None
    ) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_LMS")}
        clean["PYTHONPATH"] = os.pathsep.join([*PATHS, *filter(None, [clean.get("PYTHONPATH")])])
        self._started = {
            name: subprocess.Popen(
                [sys.executable, *arguments],
                env=clean | (environments or {}).get(name, {}),
                cwd=REPOSITORY,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for name, arguments in programs.items()
        }

    def __enter__(self) -> NewInterpreters:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self._started.values():
            process.kill()
            process.communicate()

    def check(self, name: str) -> str:
        """Waits for a program, which must succeed, and returns what it has printed."""
        process = self._started[name]
        try:
            output, _ = process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            raise AssertionError(f"{name} took more than {PATIENCE_S} s:\n{output[-3000:]}") from None
        assert process.returncode == 0, f"{name} ended with status {process.returncode}:\n{output[-3000:]}"
        return output
