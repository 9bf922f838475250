"""Functions in a process of their own, for what a process can do but once: choose a spill directory, fail, exit.

Each process is forked from one that has imported PyTorch but has never paged, which saves that import's seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch_lms
from tests.unit.markers import CHAOS

# What planners import; under chaos mode not: that begins with torch_lms, and nothing that has begun may be forked.
PLANNER = [] if CHAOS else ["scipy.optimize", "scipy.sparse", "torch_lms.plan.__main__"]
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    ["torch._inductor.output_code", "numpy", "pytest", "hypothesis", *PLANNER, "tests.unit.preloaded"]
)

PACKAGE_ROOT = Path(torch_lms.__file__).parents[1]
ANSWER_WITHIN_S = 60  # importing takes most of it
REPOSITORY = Path(__file__).parents[2]


def _run(answer: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        answer.send((function(*arguments), None))
    except BaseException:
        answer.send((None, traceback.format_exc()))


def in_fresh_process(function: Callable[..., Any], *arguments: Any, within_s: float = ANSWER_WITHIN_S) -> Any:
    """Calls a function of a module in a new process; its result, or an assertion with its traceback.

    A process that does not answer is ended: an endless wait in the core holds up no signal and no other test.
    """
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(there, function, arguments))
    process.start()
    there.close()
    try:
        value, failure = here.recv() if here.poll(within_s) else (None, "the process did not answer")
    except EOFError:
        value, failure = None, "the process ended without an answer"
    if failure is not None:
        process.kill()
    process.join()
    assert failure is None, failure
    assert process.exitcode == 0
    return value


def run_python(*arguments: str, root: Path = PACKAGE_ROOT) -> subprocess.CompletedProcess[str]:
    """A new interpreter in an empty place, with the package under ``root`` and these tests, without chaos mode."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_LMS")}
    return subprocess.run(
        [sys.executable, *arguments],
        env={**clean, "PYTHONPATH": os.pathsep.join([str(root), str(REPOSITORY)])},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
