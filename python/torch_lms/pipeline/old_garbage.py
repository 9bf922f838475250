"""Keeps Python from looking through all its old objects in the middle of a step.

Where one rank stops, all wait for it, and with the objects that tracing and planning leave such a collection may take
as long as a step. Young objects are collected as ever, so that cycles of values which a forward makes do not stay until
a step ends.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["old_garbage_later"]

_NEVER = (1 << 31) - 1

_lock = threading.Lock()
_inside = 0
_threshold = 0  # that of the oldest generation, outside


@contextmanager
def old_garbage_later() -> Iterator[None]:
    """Has Python's collections of the oldest generation wait until the end; of all threads that are inside."""
    global _inside, _threshold
    with _lock:
        young, middle, old = gc.get_threshold()
        if _inside == 0:
            _threshold = old
            gc.set_threshold(young, middle, _NEVER)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            young, middle, old = gc.get_threshold()
            if _inside == 0 and old == _NEVER:  # else the program has set another one meanwhile
                gc.set_threshold(young, middle, _threshold)
