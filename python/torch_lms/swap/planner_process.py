"""The planner in a process of its own, so that it takes nothing from the program's threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch_lms.errors import PlanError
from torch_lms.plan.messages import read_message, write_message

__all__ = ["PlannerProcess"]

_PATIENCE_SECONDS = 600


class PlannerProcess:
    """A planner that waits for a request. Its methods may be called from any thread."""

    def __init__(self) -> None:
        package = str(Path(__file__).parents[2])
        environment = {key: value for key, value in os.environ.items() if key != "TORCH_LMS_CHAOS"}
        environment["PYTHONPATH"] = os.pathsep.join([package, environment.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "torch_lms.plan"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )

    def answers(self, request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """What it answers: one plan soon, and a better one later if there is one. To be called once.

        Args:
            request: as `torch_lms.plan.__main__.answers` takes it.

        Raises:
            PlanError: if no plan keeps the limit; it says why.
            OSError: if the process has been killed.
        """
        patience = threading.Timer(_PATIENCE_SECONDS, self.kill)
        patience.daemon = True
        patience.start()
        with self._process as process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stderr is not None
            try:
                write_message(process.stdin, request)
                process.stdin.close()
                while (answer := read_message(process.stdout)) is not None:
                    yield answer
                said = process.stderr.read().decode(errors="replace").strip()
            except BaseException:  # also where nobody wants more: to leave the process open would wait for it
                self.kill()
                raise
            finally:
                patience.cancel()
        if process.returncode != 0:
            raise PlanError(said.splitlines()[-1] if said else "no answer of the planner")

    def kill(self) -> None:
        """Ends it now; nothing happens if it has ended."""
        self._process.kill()
