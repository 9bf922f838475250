"""What the ranks of a group tell each other through the store of torch.distributed.

All operations return at once, so that a wait for a rank that has died can be left, and go through a connection of their
own: PyTorch's may be taken by a wait of another thread. PyTorch before 2.5 has no second connection; there a heartbeat
may come late while a process group is being made.
"""

from __future__ import annotations

import hashlib
import pickle
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from torch_lms.errors import PipelineError
from torch_lms.pipeline.members import Members

if TYPE_CHECKING:
    from torch_lms.pipeline.liveness import Liveness

__all__ = ["Circle", "CountingStore", "Messages"]

_ANSWER_S = 1800.0  # the time that process groups give as a rule
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


class Messages:
    """Objects from rank to rank; whoever waits for one hears of failures meanwhile.

    Args:
        circle: the ranks.
        liveness: knows of failures.
    """

    def __init__(self, circle: Circle, liveness: Liveness) -> None:
        self._circle, self._liveness = circle, liveness
        self._gathered = 0

    def tell(self, key: str, value: Any) -> None:
        """Leaves an object for one other rank, or for several."""
        self._circle.put(key, pickle.dumps(value))

    def hear(self, key: str, teller: int, *, last: bool = True) -> Any:
        """Waits for an object.

        Args:
            key: that it was left under.
            teller: place of the rank that leaves it.
            last: whether no other rank will ask for it.

        Raises:
            PipelineError: if a rank fails meanwhile, the teller has closed its pipeline, or the object does not come in
                half an hour.
        """
        end, pause = time.monotonic() + _ANSWER_S, _FIRST_PAUSE_S
        rank = self._circle.members.ranks[teller]
        while (found := self._circle.find(key)) is None:
            self._liveness.check()
            if self._liveness.has_closed(rank) and self._circle.find(key) is None:  # nothing comes after a goodbye
                raise PipelineError(
                    f"expected an answer of rank {rank}, found that it has closed its pipeline; call the pipeline on "
                    "all of its ranks alike"
                )
            if time.monotonic() > end:
                raise PipelineError(
                    f"expected an answer of rank {rank} in {_ANSWER_S:.0f} s, found none; call the pipeline on all of "
                    "its ranks alike"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        if last:
            self._circle.delete(key)
        return pickle.loads(found)

    def gather(self, value: Any) -> list[Any]:
        """Everyone's object, on everyone."""
        members = self._circle.members
        self._gathered += 1
        self.tell(f"gathered/{self._gathered}/{members.place}", value)
        told = [self.hear(f"gathered/{self._gathered}/{place}", place, last=False) for place in range(members.count)]
        if self._gathered > 1:  # who has told something now has heard all of the time before
            self._circle.delete(f"gathered/{self._gathered - 1}/{members.place}")
        return told
