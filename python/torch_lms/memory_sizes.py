"""Sizes of memory as people write and read them."""

from __future__ import annotations

import re
from fractions import Fraction

from torch_lms.errors import LimitError

__all__ = ["GIB", "in_gib", "parse_bytes", "size_text"]

GIB = 1 << 30

_UNITS_BYTES = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_MOST_BYTES = 2**62
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*|%)\s*", re.IGNORECASE)


def parse_bytes(size: int | str, *, total_bytes: int | None = None) -> int:
    """Turns a size into bytes.

    Args:
        size: bytes, or a number with a unit (``"24GiB"``, ``"1.5 GB"``), or a percentage (``"50%"``).
        total_bytes: what a percentage is a percentage of; without it percentages are refused.

    Returns:
        A positive number of bytes.

    Raises:
        LimitError: if ``size`` is not a positive size.
    """
    nbytes = 0
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise LimitError(f"expected a size in bytes or a text such as '24GiB', found {size!r}; pass an int or a str")
    if isinstance(size, int):
        nbytes = size
    else:
        match = _SIZE.fullmatch(size)
        unit = match[2].lower() if match else ""
        if match is None or (unit != "%" and unit not in _UNITS_BYTES):
            raise LimitError(
                f"expected a size such as '24GiB', '512MiB', '1.5GB' or '50%', found {size!r}; "
                "use one of the units B, KB, MB, GB, TB, KiB, MiB, GiB, TiB or %"
            )
        if unit == "%":
            if total_bytes is None:
                raise LimitError(f"expected a size in bytes here, found the percentage {size!r}; name a size")
            if Fraction(match[1]) > 100:
                raise LimitError(f"expected at most 100% of what is there, found {size!r}; pass a smaller size")
            nbytes = int(Fraction(match[1]) * total_bytes / 100)
        else:
            nbytes = int(Fraction(match[1]) * _UNITS_BYTES[unit])
    if nbytes <= 0:
        raise LimitError(f"expected a size of at least one byte, found {size!r}; pass a positive size")
    if nbytes > _MOST_BYTES:
        raise LimitError(f"expected a size that memory can have, found {str(size)[:40]!r}; pass a smaller size")
    return nbytes


def in_gib(nbytes: float) -> str:
    """A size for people: ``"1.50 GiB"``."""
    return f"{nbytes / GIB:.2f} GiB"


def size_text(nbytes: float) -> str:
    """A size that may be small, for people: ``"24 B"``, ``"1.50 MiB"``, ``"1.50 GiB"``."""
    for unit, each in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if each <= nbytes < GIB:
            return f"{nbytes / each:.2f} {unit}"
    return f"{nbytes:.0f} B" if nbytes < 1 << 10 else in_gib(nbytes)
