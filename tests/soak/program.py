"""What the programs of this folder share: their arguments, an end in time, and one line that says how it went."""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Given", "finish", "parse", "run_threads"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """The arguments of a program, and the moment at which it has to end."""

    device: str
    threads: int
    seed: int
    end: float

    def is_over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self.end


def parse(description: str | None, *, threads: int = 2) -> Given:
    """Reads the arguments, and sees that a hang ends with every thread's stack.

    Args:
        description: of the program.
        threads: how many there are if no argument says so.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=25)
    parser.add_argument("--threads", type=int, default=threads)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    faulthandler.enable()
    faulthandler.dump_traceback_later(5 * given.seconds + 120, exit=True)
    torch.set_num_threads(1)
    torch.manual_seed(given.seed)
    return Given(device=given.device, threads=given.threads, seed=given.seed, end=time.monotonic() + given.seconds)


def run_threads(bodies: Sequence[Callable[[], None]], *, barrier: threading.Barrier | None = None) -> list[str]:
    """Runs each on a thread of its own until all have ended.

    Args:
        bodies: what the threads do.
        barrier: where they meet; broken by one that fails, so that the others end as well.

    Returns:
        What each of those that failed has raised.
    """
    failures: list[str] = []

    def run(body: Callable[[], None]) -> None:
        try:
            body()
        except threading.BrokenBarrierError:
            pass  # another thread's failure
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")
            if barrier is not None:
                barrier.abort()

    threads = [threading.Thread(target=run, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        os._exit(130)  # the threads would go on until their time is up
    return failures


def finish(facts: str, failures: Sequence[str]) -> None:
    """Says in one line how it went, and ends the process: with status 1 if something failed.

    Args:
        facts: what was done, in a few words.
        failures: what went wrong; the first is shown.
    """
    faulthandler.cancel_dump_traceback_later()
    spec = sys.modules["__main__"].__spec__
    name = spec.name.rpartition(".")[2] if spec is not None else sys.argv[0]
    line = f"{name}: {'FAILED' if failures else 'passed'}: {facts}"
    if failures:
        line += f"; {len(failures)} failures, the first: {' '.join(failures[0].split())[:400]}"
    print(line, flush=True)
    sys.exit(bool(failures))
