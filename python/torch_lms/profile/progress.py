"""A progress bar for people who wait."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from torch_lms.errors import ProfileError

__all__ = ["Progress"]


class Progress:
    """Shows what a profile is about; a context manager.

    Args:
        show: None means on terminals.
        name: of the model.

    Raises:
        ProfileError: if it is wanted and `rich` is not installed.
    """

    def __init__(self, show: bool | None, name: str) -> None:
        self._name = name
        self._bar: Any = None
        installed = find_spec("rich") is not None
        if show and not installed:
            raise ProfileError("expected rich for the progress bar, found none; install it: pip install rich")
        if show or (show is None and installed and sys.stderr.isatty()):
            from rich import progress
            from rich.console import Console

            columns = [
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TimeRemainingColumn(),
            ]
            self._bar = progress.Progress(*columns, console=Console(stderr=True))

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_raised: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    @contextmanager
    def phase(self, what: str, total: int = 1) -> Iterator[Callable[[], None]]:
        """One part of the work.

        Yields:
            What is called after each of its ``total`` steps; a part of one step needs no call.
        """
        if self._bar is None:
            yield lambda: None
            return
        task = self._bar.add_task(f"{self._name}: {what}", total=total)
        yield lambda: self._bar.advance(task)
        self._bar.update(task, completed=total)
