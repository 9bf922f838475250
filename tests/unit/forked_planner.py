"""Planners that are forked from a process that has imported what they need, which saves them a second of that.

That a program starts one as a process of its own is tested in ``tests/plan``, and in processes that tests start.
"""

from __future__ import annotations

import os
import sys
from multiprocessing.reduction import DupFd
from typing import Any

from tests.unit.fresh_process import context

__all__ = ["ForkedPlanner"]


class _End:
    """The number of an open file, which is another one in the process that gets it."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _detached, (DupFd(self._number),)


def _detached(duplicate: Any) -> int:
    number: int = duplicate.detach()
    return number


def _plan(*ends: int) -> None:
    from torch_lms.plan.__main__ import main

    for number, end in enumerate(ends):
        os.dup2(end, number)
        os.close(end)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    sys.exit(main())


class ForkedPlanner:
    """What the `subprocess.Popen` of a planner is to who talks to it."""

    def __init__(self, _line: list[str], *, stderr: Any, **_options: Any) -> None:
        given, to_planner = os.pipe()
        from_planner, told = os.pipe()
        ends = [_End(one) for one in (given, told, stderr.fileno())]
        self._process = context.Process(target=_plan, args=ends)
        self._process.start()
        os.close(given)
        os.close(told)
        self.stdin, self.stdout = os.fdopen(to_planner, "wb"), os.fdopen(from_planner, "rb")

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int | None:
        self._process.join()
        return self.returncode

    def kill(self) -> None:
        self._process.kill()

    def __enter__(self) -> ForkedPlanner:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self.stdin, self.stdout):
            file.close()
        self.wait()
