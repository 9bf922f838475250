"""What the host offers for paged-out bytes: memory, its control group's limit, and the disk to spill to."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from torch_lms._core import core

__all__ = ["SpillPlace", "available_bytes", "memory_bytes", "spill_place"]

_IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True, kw_only=True, slots=True)
class SpillPlace:
    """A directory for spill files.

    Attributes:
        directory: its path.
        filesystem: what it lies on, such as ``ext4``.
        free_bytes: what is free there.
    """

    directory: str
    filesystem: str
    free_bytes: int

    @property
    def in_memory(self) -> bool:
        """Whether its files take main memory, so that nothing is gained by paging to it."""
        return self.filesystem in _IN_MEMORY


def spill_place(mounts: Path = Path("/proc/self/mounts")) -> SpillPlace:
    """Where a CPU's storages are paged out to by default."""
    directory = os.environ.get("TMPDIR") or "/tmp"
    return SpillPlace(
        directory=directory,
        filesystem=_filesystem(Path(directory).resolve(), mounts),
        free_bytes=shutil.disk_usage(directory).free,
    )


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Main memory that programs can still get, from the kernel's estimate.

    Raises:
        OSError: where the kernel does not say.
    """
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"expected MemAvailable in {meminfo}, found none; run on Linux 3.14 or later")


def memory_bytes() -> int:
    """Main memory, or the control group's limit where that is less."""
    total: int = core.total_bytes("cpu")
    return total


def _filesystem(directory: Path, mounts: Path) -> str:
    """The kind of the mount that a directory lies on: the longest that it begins with, the last of equals."""
    found, kind = -1, "unknown"
    for line in mounts.read_text().splitlines():
        _, mount, filesystem, *_ = line.split()
        if directory.is_relative_to(mount) and len(mount) >= found:
            found, kind = len(mount), filesystem
    return kind
