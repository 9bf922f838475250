"""The least that seeing an op costs: a callback of PyTorch's that gets inputs, perhaps outputs, and does nothing."""

from __future__ import annotations

import os
import sys
from functools import cache, partial
from pathlib import Path
from types import ModuleType

import torch
import torch.utils.cpp_extension

from benchmarks.turns import Scope

__all__ = ["empty_callback"]

_HERE = Path(__file__).parent


def empty_callback(*, outputs: bool) -> Scope:
    """Installs it, and takes it away. The first call compiles it, which takes half a minute."""
    built = _built()
    return Scope(begin=partial(built.install, outputs), end=built.uninstall)


@cache
def _built() -> ModuleType:
    folder = _HERE.parent / "build" / "empty_callback" / torch.__version__
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # ninja's program
    built: ModuleType = torch.utils.cpp_extension.load(
        "torch_lms_empty_callback",
        [str(_HERE / "empty_callback.cpp")],
        # Without NDEBUG the layout of some of PyTorch's classes would differ from its own.
        extra_cflags=["-O2", "-DNDEBUG"],
        with_cuda=False,
        build_directory=str(folder),
    )
    return built
