"""Another extension's code (`foreign_code.cpp`), compiled unless it has been."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.utils.cpp_extension

__all__ = ["TO_READ", "TO_WRITE", "load", "needs_compiler"]

TO_READ = ["const_data_ptr", "data_ptr", "const_void_data_ptr", "storage_data"]
TO_WRITE = [
    "data_ptr",
    "void_data_ptr",
    "mutable_data_ptr",
    "accessor",
    "packed_accessor",
    "storage_mutable_data",
    "storage_mutable_data_ptr",
    "view",
    "dlpack",
]

needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("c++")), reason="an extension needs a C++ compiler"
)
_HERE = Path(__file__).parent


@functools.cache
def load() -> ModuleType:
    """The extension. Without NDEBUG the layout of some of PyTorch's classes would differ from its own."""
    folder = _HERE.parents[1] / "build" / "test_extensions" / torch.__version__
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # ninja's program
    extension = torch.utils.cpp_extension.load(
        "torch_lms_foreign_code",
        [str(_HERE / "foreign_code.cpp")],
        extra_cflags=["-O1", "-DNDEBUG"],
        with_cuda=False,
        build_directory=str(folder),
    )
    assert (extension.to_read, extension.to_write) == (TO_READ, TO_WRITE)
    return extension
