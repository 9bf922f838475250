"""The command line: ``python -m torch_lms train`` and ``python -m torch_lms doctor``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from io import TextIOWrapper

__all__ = ["main"]

_NEEDED = ("rich", "matplotlib")
_STOPPED = 130  # as shells have it for SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that the arguments name.

    Args:
        arguments: words after the program's name; by default those of this process.

    Returns:
        The exit status: 0 if all is well, 1 if a check was missed or a run failed, 2 for wrong arguments.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        print(
            f"torch_lms: expected {' and '.join(_NEEDED)} for the command line, found no {' and no '.join(missing)}; "
            "install them: pip install 'torch-lms[cli]'",
            file=sys.stderr,
        )
        return 2
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what a terminal cannot show is no error
    try:
        from torch_lms.cli import command  # this takes seconds, in which somebody may stop it

        return command.run(arguments)
    except KeyboardInterrupt:
        print("torch_lms: stopped, as asked", file=sys.stderr)
        return _STOPPED
