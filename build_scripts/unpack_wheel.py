"""Lays what a released wheel has of PyTorch's source out as in the source.

Headers, Python files and the code generator's inputs are in the wheel as they are in the source, under other
names. Usage: unpack_wheel.py WHEEL FOLDER
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

# The longest prefix counts; None leaves a file out.
PLACES: dict[str, str | None] = {
    "torch/include/c10/": "c10/",
    "torch/include/ATen/": "aten/src/ATen/",
    "torch/include/caffe2/": "caffe2/",
    "torch/include/torch/": "torch/",
    "torch/include/": None,
    "torch/": "torch/",
    "torchgen/packaged/ATen/": "aten/src/ATen/",
    "torchgen/": "torchgen/",
}

# Written by the build, not in the source.
GENERATED = ("torch/version.py", "torch/include/c10/macros/cmake_macros.h", "torch/include/ATen/ops/")
SUFFIXES = (".h", ".cuh", ".py", ".yaml", ".hpp", ".cpp", ".pyi", ".in", ".cu")


def place_of(name: str) -> str | None:
    """Where a file of the wheel is in the source; None if it is not there."""
    if name.startswith(GENERATED) or not name.endswith(SUFFIXES):
        return None
    prefix = max((prefix for prefix in PLACES if name.startswith(prefix)), key=len, default=None)
    place = PLACES[prefix] if prefix is not None else None
    return None if prefix is None or place is None else place + name[len(prefix) :]


def unpack(wheel: Path, folder: Path) -> int:
    """Writes every file of the source that the wheel has; returns how many."""
    count = 0
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            place = place_of(entry.filename)
            if place is None:
                continue
            target = folder / place
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(entry))
            count += 1
    return count


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("expected WHEEL and FOLDER; see build_scripts/get_source.sh --help")
    print(f"{unpack(Path(sys.argv[1]), Path(sys.argv[2]))} files of the source are in the wheel")
