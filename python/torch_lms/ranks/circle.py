"""What the ranks of a group tell each other through the store of torch.distributed.

All operations of the store return at once, so that a wait for a rank that has died can be left, and go through a
connection of their own: PyTorch's may be taken by a wait of another thread. PyTorch before 2.5 has no second
connection; there a heartbeat may come late while a process group is being made.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from torch_lms.ranks.members import Members

__all__ = ["Circle", "CountingStore"]

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1e-4, 5e-3

_made: Counter[tuple[str, tuple[int, ...]]] = Counter()


class Circle:
    """Keys and values that the members see, and no one else.

    All members make their circles in the same order; circles of other members do not count.

    Args:
        members: who they are.
        purpose: tells circles of the same members apart.

    Threads: all methods are for any thread.
    """

    def __init__(self, members: Members, purpose: str) -> None:
        self.members = members
        _made[purpose, members.ranks] += 1
        ranks = hashlib.sha1(str(members.ranks).encode(), usedforsecurity=False).hexdigest()
        prefix = f"torch_lms/{purpose}/{ranks}/{_made[purpose, members.ranks]}"
        store: Any = dist.distributed_c10d.PrefixStore(prefix, _own_connection())
        self._store = store if hasattr(store, "check") else CountingStore(store)
        self._lock = threading.Lock()

    def put(self, key: str, value: bytes) -> None:
        """Sets a key."""
        with self._lock:
            self._store.set(key, value)

    def find(self, key: str) -> bytes | None:
        """A key's value; None if it was not set."""
        with self._lock:
            return bytes(self._store.get(key)) if self._store.check([key]) else None

    def wait(self, key: str, timeout_s: float, check: Callable[[], None] = lambda: None) -> bytes | None:
        """A key's value as soon as it is set; None if that takes too long.

        Args:
            key: that another member sets.
            timeout_s: how long to wait.
            check: is called before each further look, and may raise.
        """
        end, pause = time.monotonic() + timeout_s, _FIRST_PAUSE_S
        while (found := self.find(key)) is None and time.monotonic() <= end:
            check()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return found

    def delete(self, key: str) -> None:
        """Forgets a key."""
        with self._lock:
            self._store.delete_key(key)


def _own_connection() -> Any:
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone() if hasattr(store, "clone") else store


class CountingStore:
    """Gives a store `check` where PyTorch's has none: a count beside each key tells whether that was set.

    Args:
        store: of torch.distributed.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self.get = store.get

    def set(self, key: str, value: bytes) -> None:
        """Sets a key."""
        self._store.set(key, value)
        self._store.add(f"{key}/count", 1)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set."""
        return all(self._store.add(f"{key}/count", 0) > 0 for key in keys)

    def delete_key(self, key: str) -> None:
        """Forgets a key."""
        self._store.delete_key(f"{key}/count")
        self._store.delete_key(key)
