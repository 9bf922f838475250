"""Blocks that are held until the ops that need them in one piece.

Note [Placeholders in plans]: memory that is free lies in pieces once storages of many sizes have come and gone, and an
allocator that has no piece large enough maps other memory, for which the device waits. What a cycle's largest storages
will need is in one piece when the cycle begins. So it is held from then on, and what is held counts as in use. But
where memory is full for a while, and there is room later on, it is held from there on: an optimizer that works through
more state than fits could not use what is held for the next forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from torch_lms.plan.decision import Decision
from torch_lms.plan.fields import Since
from torch_lms.plan.trace import Trace

__all__ = ["Placeholder", "find_placeholders", "with_placeholders"]

_MOST = 16
_SHARE_OF_LARGEST = 2  # from half of the largest storage on
_SHARE_OF_LIMIT = 64  # smaller ones find a place
_CROWDED = 3  # where more than a third of the limit is in use
_FEWEST_PLACES = 64  # it may not be possible at once


@dataclass(frozen=True, kw_only=True, slots=True)
class Placeholder:
    """A block that is held for a storage that has not been made yet.

    Attributes:
        bytes: its size.
        until: the place whose op takes it.
        since: the first place at which it is held.
    """

    bytes: int
    until: int
    since: Annotated[int, Since(3)] = 0


def find_placeholders(
    trace: Trace, decisions: Iterable[Decision], memory_bytes: Sequence[int], limit_bytes: int, most_bytes: int
) -> list[Placeholder]:
    """A block for each of the largest storages that are there at once, in the order in which they are made.

    Args:
        trace: of the cycle.
        decisions: for the storages that leave.
        memory_bytes: in use at each place with them.
        limit_bytes: of the device's memory.
        most_bytes: that these decisions may have in use.
    """
    found: list[Placeholder] = []
    free_after: list[int] = []  # by block: the place after which it can be used again
    for producer, size_bytes, end in _largest(trace, decisions, limit_bytes // _SHARE_OF_LIMIT):
        again = next((i for i, one in enumerate(found) if free_after[i] < producer and one.bytes >= size_bytes), None)
        if again is None:
            found.append(Placeholder(bytes=size_bytes, until=producer))
            free_after.append(end)
        else:
            free_after[again] = end
    crowded = [one for one in found if memory_bytes[one.until] * _CROWDED >= limit_bytes][:_MOST]
    return list(_held_where_there_is_room(crowded, list(memory_bytes), most_bytes))


def _held_where_there_is_room(
    found: Iterable[Placeholder], used_bytes: list[int], most_bytes: int
) -> Iterator[Placeholder]:
    """Each from the first place on from which there is room until it is taken; if there is none, from the beginning."""
    for one in found:
        since = one.until
        while since > 0 and used_bytes[since - 1] + one.bytes <= most_bytes:
            since -= 1
        if one.until - since < _FEWEST_PLACES:
            since = 0
        for place in range(since, one.until):
            used_bytes[place] += one.bytes
        yield replace(one, since=since)


def _largest(trace: Trace, decisions: Iterable[Decision], least_bytes: int) -> Iterator[tuple[int, int, int]]:
    """The place that makes it, its bytes, and the place after which it is gone."""
    least_bytes = max(least_bytes, max((one.bytes for one in trace.storages), default=0) // _SHARE_OF_LARGEST)
    leaves: dict[int, int] = {}
    for given in decisions:
        if given.out_after is not None:
            leaves[given.storage] = min(given.out_after, leaves.get(given.storage, given.out_after))
    made = sorted(
        (storage.producer, -storage.bytes, number)
        for number, storage in enumerate(trace.storages)
        if storage.producer and storage.bytes >= least_bytes
    )
    for producer, _, number in made:
        storage = trace.storages[number]
        last = len(trace.ops) if storage.released is None else storage.released
        yield producer, storage.bytes, leaves.get(number, last)


def with_placeholders(trace: Trace, placeholders: Sequence[Placeholder]) -> Trace:
    """The trace of a program that has these blocks in use, too."""
    ops = (
        replace(
            op, other_bytes=op.other_bytes + sum(one.bytes for one in placeholders if one.since <= place < one.until)
        )
        for place, op in enumerate(trace.ops)
    )
    return replace(trace, ops=tuple(ops))
