"""The planner in a process of its own, so that it takes nothing from the program's threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from torch_lms.errors import PlanError
from torch_lms.plan.messages import read_message, write_message

__all__ = ["PlannerProcess"]

_PATIENCE_SECONDS = 600


class PlannerProcess:
    """A planner that waits for a request. Its methods may be called from any thread."""

    def __init__(self) -> None:
        package = str(Path(__file__).parents[2])
        environment = {key: value for key, value in os.environ.items() if key != "TORCH_LMS_CHAOS"}
        environment["PYTHONSAFEPATH"] = "1"  # the folder that the program runs in may have modules of any name
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package, environment.get("PYTHONPATH")]))
        self._took_too_long = False
        # A file in memory: a pipe that nobody reads while answers are waited for would fill, and hold the planner up.
        self._words = os.fdopen(os.memfd_create("torch_lms planner"), "w+b")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "torch_lms.plan"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            env=environment,
        )

    def answers(self, request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """What it answers: one plan soon, and a better one later if there is one. To be called once.

        Args:
            request: as `torch_lms.plan.__main__.answers` takes it.

        Raises:
            PlanError: if no plan keeps the limit, or the process has ended or been killed; it says why.
        """
        patience = threading.Timer(_PATIENCE_SECONDS, self._give_up)
        patience.daemon = True
        patience.start()
        with self._words, self._process as process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                self._send(process.stdin, request)
                while (answer := read_message(process.stdout)) is not None:
                    yield answer
                if process.wait() != 0:
                    raise PlanError(self._reason(process.returncode))
            except BaseException:  # also where nobody wants more: to leave the process open would wait for it
                self.kill()
                raise
            finally:
                patience.cancel()

    def _send(self, planner: IO[bytes], request: Mapping[str, Any]) -> None:
        try:
            write_message(planner, request)
            planner.close()
        except BrokenPipeError as error:  # it has ended before it had all of it, and says why
            with suppress(BrokenPipeError):
                planner.close()  # what is left of it goes nowhere
            raise PlanError(self._reason(self._process.wait())) from error

    def _reason(self, status: int) -> str:
        self._words.seek(0)
        lines = self._words.read().decode(errors="replace").strip().splitlines()
        if self._took_too_long:
            lines.append(f"expected a plan within {_PATIENCE_SECONDS} s, found none; give the machine less other work")
        elif status < 0:
            lines.append(
                f"expected answers of the planner's process, found it ended by {signal.Signals(-status).name}; where "
                "memory was short, give the machine more"
            )
        return lines[-1] if lines else f"expected answers of the planner's process, found it ended with status {status}"

    def _give_up(self) -> None:
        self._took_too_long = True
        self.kill()

    def kill(self) -> None:
        """Ends it now; nothing happens if it has ended."""
        self._process.kill()
