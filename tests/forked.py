"""Programs whose processes are forked from ones that have imported PyTorch, which saves them the seconds of that.

They begin as ``python -m`` does and end as it does, with the interpreter torn down. Two servers, with hashes of strings
of their own, fork them in turns: ranks that go through a set in another order than their neighbours are found out.
``python -m tests.forked`` is a server.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import runpy
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from tests.quickly import begin_quickly

ROOT = Path(__file__).parents[1]
# Optimizers import torch._dynamo at their first step, and several modules of PyTorch sympy.
PRELOADED = ("torch", "torch.distributed", "numpy", "torch._inductor.output_code")
LOOK_EVERY_S = 0.01


@dataclass(frozen=True)
class Program:
    """``python -m module words``, its output in ``log``; its environment is the caller's with ``environment``."""

    module: str
    words: list[str]
    log: Path
    environment: dict[str, str] = field(default_factory=dict)


class _Server:
    def __init__(self) -> None:
        self.connection, there = Pipe()
        words = [sys.executable, "-m", "tests.forked", str(there.fileno())]
        paths = [*(path for path in sys.path if path), str(ROOT)]
        # One thread, as programs beside one another have; read where PyTorch is imported.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(words, env=environment, cwd=ROOT, pass_fds=[there.fileno()])
        there.close()

    def close(self) -> None:
        """Ends it, and what it runs."""
        self.connection.close()
        self.process.wait()


_servers: list[_Server] = []


@atexit.register
def _close() -> None:
    while _servers:
        _servers.pop().close()


def run_programs(programs: list[Program], *, timeout_s: float) -> list[int]:
    """Runs them at once; their statuses, below 0 for a signal. Who runs too long is killed."""
    while len(_servers) < min(2, len(programs)):
        _servers.append(_Server())
    statuses = {}
    try:
        for place, program in enumerate(programs):
            environment = {**os.environ, **program.environment}
            _servers[place % 2].connection.send((place, program, environment, timeout_s))
        for place in range(len(programs)):
            which, status = _servers[place % 2].connection.recv()
            statuses[which] = status
    except BaseException:
        _close()  # what runs for nobody, and answers that nobody waits for
        raise
    return [statuses[place] for place in range(len(programs))]


def _begin(program: Program, environment: dict[str, str]) -> None:
    """Makes of a forked process one that has just been started."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(program.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for file, number in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(file, number)
    os.close(nothing)
    os.close(output)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [program.module, *program.words]


def _reap(connection: Connection, running: dict[int, tuple[int, float]]) -> None:
    """Tells who has ended; kills who is late."""
    for pid, (place, end) in list(running.items()):
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            del running[pid]
            connection.send((place, os.waitstatus_to_exitcode(status)))


def _serve(connection: Connection) -> Program | None:
    """The program of this process, if it is a forked one; nothing once there is nobody to serve."""
    running: dict[int, tuple[int, float]] = {}
    while True:
        try:
            if connection.poll(LOOK_EVERY_S if running else None):
                place, program, environment, timeout_s = connection.recv()
                pid = os.fork()
                if pid == 0:
                    connection.close()
                    _begin(program, environment)
                    return program
                running[pid] = place, time.monotonic() + timeout_s
            _reap(connection, running)
        except (EOFError, OSError):
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            return None


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who waits for the programs ends them
    connection = Connection(int(sys.argv[1]))
    on_cuda = os.environ.get("TORCH_LMS_TEST_DEVICE") == "cuda"
    for name in PRELOADED[: 1 if on_cuda else None]:  # a device that a process has looked at is lost to its children
        with contextlib.suppress(ImportError):  # older PyTorch has not all
            importlib.import_module(name)
    begin_quickly()
    program = _serve(connection)
    if program is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        runpy.run_module(program.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
