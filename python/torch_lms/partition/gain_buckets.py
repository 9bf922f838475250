"""The bucket array of Fiduccia and Mattheyses: the highest gains are found without sorting.

Source: Fiduccia and Mattheyses, "A linear-time heuristic for improving network partitions", DAC 1982: BUCKET, an array
of lists by gain, and MAXGAIN, the highest one in use.

Note [Quantised gains]: their gains are small integers, as each net weighs one. Ours are bytes, so there cannot be a
bucket for each. A gain's bucket follows from its sign, its number of binary digits and the two digits after the first
one: small numbers have a bucket each, and gains within a bucket differ by less than a quarter. So the array has the
same length for every graph, and each change of a gain takes constant time. Only the order of choice is rounded; the
gains themselves stay exact.
"""

from __future__ import annotations

__all__ = ["GainBuckets", "bucket_of"]

_MIDDLE = 4 * 64


def bucket_of(gain: int) -> int:
    """The bucket of a gain of less than 2**62; see Note [Quantised gains]."""
    size = abs(gain)
    digits = size.bit_length()
    level = size if digits < 3 else 4 * (digits - 2) + (size >> (digits - 3)) % 4
    return _MIDDLE + (level if gain >= 0 else -level)


class GainBuckets:
    """Cells by gain; of equal ones the last that came is the first that goes, as in the source.

    Attributes:
        operations: cells put or dropped and buckets looked into, so far.
    """

    def __init__(self) -> None:
        self._buckets: list[dict[int, None]] = [{} for _ in range(2 * _MIDDLE)]
        self._bucket: dict[int, int] = {}
        self._highest = 0
        self.operations = 0

    def put(self, cell: int, gain: int) -> None:
        """Adds a cell, or moves it to where its gain belongs."""
        bucket = bucket_of(gain)
        if self._bucket.get(cell) == bucket:
            return
        self.drop(cell)
        self._bucket[cell] = bucket
        self._buckets[bucket][cell] = None
        self._highest = max(self._highest, bucket)
        self.operations += 1

    def drop(self, cell: int) -> None:
        """Takes a cell out, if it is there."""
        bucket = self._bucket.pop(cell, None)
        if bucket is not None:
            del self._buckets[bucket][cell]
            self.operations += 1

    def highest(self, count: int) -> list[int]:
        """At most so many cells, those of the highest buckets."""
        found: list[int] = []
        while self._highest > 0 and not self._buckets[self._highest]:
            self._highest -= 1
            self.operations += 1
        bucket = self._highest
        while len(found) < min(count, len(self._bucket)):
            for cell in reversed(self._buckets[bucket]):
                if len(found) == count:
                    break
                found.append(cell)
            bucket -= 1
            self.operations += 1
        return found
