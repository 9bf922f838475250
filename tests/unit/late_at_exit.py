"""What runs at exit after all that modules which are imported later do there."""

from __future__ import annotations

import atexit
from collections.abc import Callable

late: list[Callable[[], object]] = []


def _run_all() -> None:
    for call in late:
        call()


atexit.register(_run_all)
