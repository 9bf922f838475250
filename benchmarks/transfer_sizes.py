"""What the benchmarks of transfers have in common: the sizes that they move, and the columns of one way at a time."""

from __future__ import annotations

__all__ = ["MIB", "ONE_WAY", "SIZES"]

MIB = 1 << 20
# Of each storage, and how many of them move at once.
SIZES = [(1 * MIB, 512), (4 * MIB, 256), (16 * MIB, 128), (64 * MIB, 32), (256 * MIB, 8), (1024 * MIB, 2)]
ONE_WAY = [
    ("size", "Storages", "{}"),
    ("plain_out", "Plain copy out (GB/s)", "{:.1f}"),
    ("out", "Page-out (GB/s)", "{:.1f}"),
    ("out_ratio", "/ plain", "{:.2f}"),
    ("plain_in", "Plain copy in (GB/s)", "{:.1f}"),
    ("in", "Page-in (GB/s)", "{:.1f}"),
    ("in_ratio", "/ plain", "{:.2f}"),
]
