"""What a program and its planner, a process of its own, tell each other.

Note [What the program does for a plan]
    A thread of a program that runs Python keeps the program's other threads from doing so, and PyTorch asks for the
    interpreter's lock in every op: each may then wait for five milliseconds. So the program does little more for a plan
    than to pass bytes on. The planner makes the trace of a recording, and compiles the plan for the core; the documents
    come along as text, which the program reads only if somebody asks for them.

Messages are dictionaries of numbers, text and bytes, by `marshal`, each behind its length: data, never code.
"""

from __future__ import annotations

import marshal
from collections.abc import Mapping
from typing import IO, Any

__all__ = ["read_message", "write_message"]

_LENGTH_BYTES = 8


def write_message(file: IO[bytes], message: Mapping[str, Any]) -> None:
    """Writes a message, and leaves nothing of it in a buffer."""
    data = marshal.dumps(dict(message))
    file.write(len(data).to_bytes(_LENGTH_BYTES, "little"))
    file.write(data)
    file.flush()


def read_message(file: IO[bytes]) -> dict[str, Any] | None:
    """The next message; None where the other side has ended, also in the middle of one."""
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    data = file.read(length)
    if not length or len(data) < length:
        return None
    message: dict[str, Any] = marshal.loads(data)
    return message
