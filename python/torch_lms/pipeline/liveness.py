"""Notices when a rank fails or dies, and says which, through the store of torch.distributed.

Note [Signs of life]: each rank beats in a thread: it sets a key of its own twice a second. A rank that fails says why
in a key of the circle, which all look at as often. A rank that is killed stops beating; the rank in front of it in
the ring of those that have not closed their pipelines notices after ``heartbeat_timeout_s`` and says so in the same
key. Gloo tells its neighbours earlier, with an error: whoever gets one asks who is silent, for `_SUSPECT_S`, and
names that rank. So an error that is thrown is known to all within a second or two, a death under Gloo within some
seconds, a death under NCCL after the timeout, unless torchrun's agent has ended the workers before. A rank whose main
thread hangs still beats: that is for the timeout of the process group.

Note [Store]: where a rank keeps the store itself, which is rank 0 without torchrun's agent, its death is seen as that
of the store.

Note [Ending waits]: a rank that hears of a failure while its main thread waits ends the transports' waits: NCCL's by
aborting the group, Gloo's by a receive that runs out of time, after which Gloo closes all connections of the group.
The group is of no use afterwards, and the others' waits end as well. What cannot be ended so, such as a wait in a
group that the pipeline does not know, is left to the timeout of that group and to torchrun. No process is ended from
here.

A forked child, such as a data loader's, has no thread that beats, and what it closes or leaves open does not matter.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torch_lms.errors import LmsError, PipelineError
from torch_lms.ranks.circle import Circle
from torch_lms.ranks.members import Members

__all__ = ["Failure", "Liveness", "end_waits", "in_words"]

_BEAT_S = 0.5
_SUSPECT_S = 4.0
_LOOK_S = 0.1
_LEAVE_S = 1.0  # that the main thread has to come back by itself
_CLOSED = b"closed"
_ENDING_TAG = 0x6C6D73
_STORE_ERRORS = (RuntimeError, OSError, ValueError)  # which one differs between stores and versions


@dataclass(frozen=True)
class Failure:
    """Which rank of the world failed first, and why; None is the process that keeps the store."""

    rank: int | None
    reason: str

    def error(self) -> PipelineError:
        """As an exception."""
        who = f"rank {self.rank}" if self.rank is not None else "torchrun's agent"
        return PipelineError(f"expected all ranks to go on, found that {who} {self.reason}; see its own output")


class Liveness:
    """What this rank knows of the others, and tells them; see Note [Signs of life].

    Args:
        circles: of the pipeline, and of data parallel; a failure in one is passed on to the other.
        heartbeat_timeout_s: how long a rank may be silent.
        on_failure: called in a thread, once, if the main thread stays in a wait after a failure.

    Threads: the public methods are for the main thread.
    """

    def __init__(
        self, circles: Sequence[Circle], heartbeat_timeout_s: float, on_failure: Callable[[], None] = lambda: None
    ) -> None:
        self.rank = dist.get_rank()
        self._circles, self._timeout_s, self._on_failure = circles, heartbeat_timeout_s, on_failure
        self._changed = threading.Condition()
        self._failure: Failure | None = None
        self._busy, self._beats = False, 0
        self._ending: threading.Thread | None = None
        self._heard: dict[tuple[int, int], tuple[bytes | None, float]] = {}
        self._store_answered_at = time.monotonic()
        self._process = os.getpid()
        self._closing = threading.Event()
        self._beat()
        self._thread = threading.Thread(target=self._watch, name="torch_lms liveness", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> Failure | None:
        """The first failure known here."""
        return self._failure

    def has_closed(self, rank: int) -> bool:
        """Whether a rank of the world has said goodbye in one of the circles, and has not failed before.

        Raises:
            PipelineError: if a rank has failed.
        """
        closed = any(circle.find(f"status/{rank}") == _CLOSED for circle in self._circles)
        if closed:
            self._look_for_failure()  # what it said before
            self.check()
        return closed

    def busy(self, value: bool) -> None:
        """Says whether the main thread is at work, where it may hang."""
        with self._changed:
            self._busy = value
            self._changed.notify_all()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Turns what follows from the death of a rank into an error that names it, and tells the others of own ones."""
        self.check()
        self.busy(True)
        try:
            yield
        except Exception as error:
            from_transport = isinstance(error, RuntimeError) and not isinstance(error, LmsError)
            failure = self.find_culprit() if from_transport else self.failure
            self.announce(f"failed: {in_words(error)}")
            if failure is not None and failure.rank != self.rank and not isinstance(error, PipelineError):
                raise failure.error() from error
            raise
        finally:
            self.busy(False)
        self.check()  # waits on CUDA may have ended without an error

    def check(self) -> None:
        """Raises PipelineError if a rank has failed, or this one has closed."""
        if self._failure is not None:
            raise self._failure.error()
        if self._closing.is_set():
            raise PipelineError("expected an open pipeline, found one that close() has ended; make another one")

    def announce(self, reason: str) -> None:
        """Tells all others that this rank has failed, unless another one failed before or this one has closed."""
        if self._closing.is_set() or os.getpid() != self._process:
            return
        self._hear(Failure(self.rank, reason))

    def find_culprit(self) -> Failure | None:
        """Asks, after an error of a transport, which rank is behind it; takes up to some seconds.

        Returns:
            None if all ranks are alive and at work.
        """
        changes: dict[tuple[Circle, int], tuple[int, bytes | None]] = {}
        end = time.monotonic() + _SUSPECT_S
        while self._failure is None and time.monotonic() < end:
            try:
                self._look_for_failure()
                for circle, other in self._others():
                    status = circle.find(f"status/{other}")
                    count, before = changes.get((circle, other), (0, status))
                    if status == _CLOSED and self._failure is None:
                        return Failure(other, "has closed its pipeline")
                    changes[circle, other] = (count + (status != before), status)
            except _STORE_ERRORS:
                self._hear(_store_failure())
                break
            if all(count >= 2 for count, _ in changes.values()):  # one change may have been under way
                return self._failure
            time.sleep(_LOOK_S)
        silent = [other for (_, other), (count, status) in changes.items() if not count and status is not None]
        if self._failure is None and silent:
            self._hear(Failure(min(silent), "died"))
        return self._failure

    def close(self) -> None:
        """Says goodbye; the others may then go on without this rank. In a forked child it does nothing."""
        if self._closing.is_set() or os.getpid() != self._process:
            return
        self._closing.set()
        self._thread.join()
        if self._ending is not None:
            self._ending.join(_SUSPECT_S)  # Python's end would break it off in the midst
        for circle in self._circles:
            try:
                circle.put(f"status/{self.rank}", _CLOSED)
            except _STORE_ERRORS:
                continue  # the store went first, and with it whoever might have asked

    def _others(self) -> Iterator[tuple[Circle, int]]:
        """The ranks behind this one in the ring of each circle."""
        for circle in self._circles:
            ranks, place = circle.members.ranks, circle.members.place
            yield from ((circle, other) for other in (*ranks[place + 1 :], *ranks[:place]))

    def _watch(self) -> None:
        while not self._closing.wait(_BEAT_S):
            try:
                self._beat()
                self._look_for_failure()
                self._look_for_silence()
                self._store_answered_at = time.monotonic()
            except _STORE_ERRORS:
                if time.monotonic() - self._store_answered_at > self._timeout_s:
                    self._hear(_store_failure())
            if self._failure is not None and self._ending is None:
                self._end_waits()

    def _beat(self) -> None:
        self._beats += 1
        for circle in self._circles:
            circle.put(f"status/{self.rank}", str(self._beats).encode())

    def _look_for_failure(self) -> None:
        for circle in self._circles:
            words = circle.find("failure")
            if words is not None:
                self._hear(Failure(*json.loads(words)))

    def _look_for_silence(self) -> None:
        """Looks at the next rank that has not closed its pipeline."""
        now = time.monotonic()
        for index, circle in enumerate(self._circles):
            for other in (other for own, other in self._others() if own is circle):
                status = circle.find(f"status/{other}")
                if status == _CLOSED:
                    continue
                before, since = self._heard.get((index, other), (None, now))
                if status is None or status != before:
                    self._heard[index, other] = (status, now)
                elif now - since > self._timeout_s:
                    self._hear(Failure(other, f"died: it gave no sign of life for {self._timeout_s:g} s"))
                break

    def _hear(self, failure: Failure) -> None:
        """Notes a failure, if it is the first, and tells all circles."""
        with self._changed:
            if self._failure is not None:
                return
            self._failure = failure
            self._changed.notify_all()
        for circle in self._circles:
            try:
                if circle.find("failure") is None:
                    circle.put("failure", json.dumps([failure.rank, failure.reason]).encode())
            except _STORE_ERRORS:
                continue  # all others find the store gone as well

    def _end_waits(self) -> None:
        with self._changed:
            if self._changed.wait_for(lambda: not self._busy, timeout=_LEAVE_S):
                return
        # Apart from here: what is to end the waits may itself hang.
        self._ending = threading.Thread(target=self._on_failure, name="torch_lms abort", daemon=True)
        self._ending.start()


def in_words(error: BaseException) -> str:
    """An error in one line, for other ranks: what others were raised from, as far as they say less."""
    while error.__cause__ is not None and not isinstance(error, LmsError):
        error = error.__cause__
    return " ".join(f"{type(error).__name__}: {error}".split())


def _store_failure() -> Failure:
    reason = "died: the store of torch.distributed, which it keeps, does not answer"
    return Failure(None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0, reason)


def end_waits(groups: Sequence[Members], device: torch.device) -> None:
    """Ends what waits in the groups; see Note [Ending waits]."""
    for members in groups:
        try:
            if members.on_nccl:
                group: Any = members.group or dist.group.WORLD
                group._get_backend(device).abort()
            elif members.count > 1:
                other = members.ranks[members.place - 1]
                receive: Any = dist.irecv(torch.zeros(1), other, group=members.group, tag=_ENDING_TAG)
                receive.wait(timedelta(milliseconds=1))
        except (AttributeError, RuntimeError) as error:
            if members.on_nccl:
                print(f"torch_lms: could not abort a transport: {error}", file=sys.stderr)
