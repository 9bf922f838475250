"""Notices at once when a rank dies, and says which.

Every two ranks keep a TCP connection that carries nothing while all is well. A rank that dies closes its connections,
whatever its transport is doing; a rank that fails says why first; a rank that is done says goodbye. So whoever waits
for a rank that will not answer learns its number and its reason instead of a timeout.
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import signal
import socket
import struct
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from torch_lms.errors import PipelineError

__all__ = ["Failure", "Liveness"]

Value = TypeVar("Value")
_HELLO = struct.Struct("<16si")
_LENGTH = struct.Struct("<i")
_CONNECT_S = 60.0
_LEFT_S = 3.0


@dataclass(frozen=True)
class Failure:
    """Which rank failed first, and why."""

    rank: int
    reason: str

    def error(self) -> PipelineError:
        """As an exception."""
        return PipelineError(
            f"expected all ranks to go on, found that rank {self.rank} {self.reason}; see its own output"
        )


class Liveness:
    """The connections to all other ranks, watched by a thread.

    Args:
        group: a group whose collectives carry objects, for the addresses.
        grace_s: how long the main thread may take to notice a failure before this process is ended.
        on_failure: called by the watching thread, once, for instance to abort a transport.

    Threads: all methods are for the main thread; the watching thread only reads connections.
    """

    def __init__(self, group: Any, grace_s: float, on_failure: Callable[[], None] = lambda: None) -> None:
        self.rank = dist.get_rank()
        self._grace_s, self._on_failure = grace_s, on_failure
        self._changed = threading.Condition()
        self._failure: Failure | None = None
        self._gone: set[int] = set()
        self._busy = False
        self._closed = False
        self._peers = _connect(group, self.rank)
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._watch, name="torch_lms liveness", daemon=True)
        self._thread.start()
        os.register_at_fork(after_in_child=partial(_let_go, weakref.WeakValueDictionary(self._peers)))

    @property
    def failure(self) -> Failure | None:
        """The first failure known here."""
        return self._failure

    def busy(self, value: bool) -> None:
        """Says whether the main thread is at work, where it may hang."""
        with self._changed:
            self._busy = value
            self._changed.notify_all()

    def check(self) -> None:
        """Raises PipelineError if a rank has failed."""
        if self._failure is not None:
            raise self._failure.error()

    def wait_for_failure(self, seconds: float) -> Failure | None:
        """Gives a failure that shows itself elsewhere first some time to be known here."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or bool(self._gone), timeout=seconds)
            if self._failure is None and self._gone:
                return Failure(min(self._gone), "has closed its pipeline")
            return self._failure

    def blame(self, rank: int, reason: str) -> Failure:
        """Notes a failure that came to be known in another way; the first one stands."""
        with self._changed:
            self._failure = self._failure or Failure(rank, reason)
            return self._failure

    def announce(self, reason: str) -> None:
        """Tells all others that this rank has failed, or passes on why."""
        failure = self._failure or Failure(self.rank, reason)
        message = json.dumps([failure.rank, failure.reason]).encode()
        self._send(_LENGTH.pack(len(message)) + message)

    def close(self) -> None:
        """Says goodbye; the others may then go on without this rank."""
        if self._closed:
            return
        self._closed = True
        self._send(_LENGTH.pack(0))
        self._wake.send(b"x")
        self._thread.join()
        for connection in (*self._peers.values(), self._wake, self._woken):
            connection.close()

    def run(self, wait: Callable[[], Value]) -> Value:
        """Waits in another thread, so that a failure ends the waiting here.

        Raises:
            PipelineError: if a rank fails meanwhile; what waits is then left behind.
        """
        outcome: list[tuple[bool, Any]] = []

        def work() -> None:
            result: tuple[bool, Any]
            try:
                result = (True, wait())
            except BaseException as error:  # it goes to the caller
                result = (False, error)
            with self._changed:
                outcome.append(result)
                self._changed.notify_all()

        waiting = threading.Thread(target=work, name="torch_lms wait", daemon=True)
        waiting.start()
        with self._changed:
            self._changed.wait_for(lambda: bool(outcome) or self._failure is not None)
        if not outcome:
            atexit.register(_end_with, waiting)
            self.check()
        succeeded, value = outcome[0]
        if not succeeded:
            raise value
        result: Value = value
        return result

    def _send(self, message: bytes) -> None:
        for connection in self._peers.values():
            try:
                connection.sendall(message)
            except OSError:
                continue  # that rank is gone; the watching thread knows

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ, None)
            for rank, connection in self._peers.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            while True:
                for key, _ in selector.select():
                    if key.data is None:
                        return
                    selector.unregister(key.fileobj)  # a rank speaks once
                    self._hear(key.data, _read_last_words(self._peers[key.data]))

    def _hear(self, rank: int, words: bytes | None) -> None:
        with self._changed:
            if words == b"":
                self._gone.add(rank)
            elif self._failure is None:
                self._failure = Failure(rank, "died") if words is None else Failure(*json.loads(words))
                # Apart from each other: what is to end the waits may itself hang.
                threading.Thread(target=self._on_failure, name="torch_lms abort", daemon=True).start()
                threading.Thread(target=self._enforce, name="torch_lms grace", daemon=True).start()
            self._changed.notify_all()

    def _enforce(self) -> None:
        """Ends this process if the main thread stays in a wait that nothing will end."""
        with self._changed:
            if self._changed.wait_for(lambda: not self._busy or self._closed, timeout=self._grace_s):
                return
        print(f"torch_lms: {self._failure.error() if self._failure else ''}", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)


def _let_go(peers: weakref.WeakValueDictionary[int, socket.socket]) -> None:
    """Closes a forked child's copies, such as a data loader's: they would keep a dead rank's connections open."""
    for connection in peers.values():
        os.close(connection.detach())


def _end_with(waiting: threading.Thread) -> None:
    """Ends the process while a thread may still be in a wait: Python cannot end it, and would abort on its return.

    The wait returns as soon as the rank at its other end is gone, so a short while is enough as a rule.
    """
    waiting.join(_LEFT_S)
    if waiting.is_alive():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _read_last_words(connection: socket.socket) -> bytes | None:
    """Empty for goodbye, a reason, or None if the rank died without a word."""
    try:
        head = _read(connection, _LENGTH.size)
        return _read(connection, _LENGTH.unpack(head)[0])
    except OSError:
        return None


def _read(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise ConnectionError("closed")
        data += more
    return data


def _connect(group: Any, rank: int) -> dict[int, socket.socket]:
    """A connection to every other rank; the higher rank calls the lower one, and proves that it knows the secret."""
    world = dist.get_world_size()
    hosts: list[Any] = [None] * world
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    alone = len(set(hosts)) == 1
    with socket.create_server(("127.0.0.1" if alone else "", 0), backlog=world) as server:
        server.settimeout(_CONNECT_S)
        places: list[Any] = [None] * world
        dist.all_gather_object(places, (server.getsockname()[1], os.urandom(16)), group=group)
        peers: dict[int, socket.socket] = {}
        for other in range(rank):
            port, secret = places[other]
            peers[other] = socket.create_connection(("127.0.0.1" if alone else hosts[other], port), timeout=_CONNECT_S)
            peers[other].sendall(_HELLO.pack(secret, rank))
        while len(peers) < world - 1:
            connection, _ = server.accept()
            connection.settimeout(_CONNECT_S)
            secret, other = _HELLO.unpack(_read(connection, _HELLO.size))
            if secret == places[rank][1]:
                peers[other] = connection
            else:
                connection.close()
    for connection in peers.values():
        connection.settimeout(None)
    return peers
