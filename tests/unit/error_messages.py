"""The shared check of every message: what was expected, what was found, what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


def check_message(message: str, *, found: str = "", do: str) -> None:
    """Checks that a message has its three parts, in order, and that they name ``found`` and ``do``."""
    expected_at = message.find("expected ")
    found_at = min((at for at in (message.find("found "), message.find("found: ")) if at >= 0), default=-1)
    assert 0 <= expected_at < found_at, f"no 'expected ... found ...' in {message!r}"
    assert message[expected_at + len("expected ") : found_at].strip(" ,"), f"nothing expected in {message!r}"
    do_at = message.find(do, found_at)
    assert do
    assert do_at > found_at + len("found "), f"no {do!r} behind what was found in {message!r}"
    assert found in message[found_at:do_at], f"no {found!r} among what was found in {message!r}"


@contextmanager
def raises_saying(kind: type[BaseException], *, found: str = "", do: str) -> Iterator[None]:
    """Expects exactly this kind of error, with a message of three parts."""
    with pytest.raises(kind) as caught:
        yield
    assert type(caught.value) is kind
    check_message(str(caught.value), found=found, do=do)
