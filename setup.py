"""Builds ``torch_lms._C`` against the installed PyTorch, with CUDA where it has CUDA.

``TORCH_LMS_DEBUG=1`` builds for a debugger; ``MAX_JOBS`` says how many compilers run at once.

Note [Files compiled together]: a file that includes PyTorch takes some seconds before its own code begins, so files are
compiled a dozen at a time, in a third of the time. For a debugger each is compiled by itself: then a change costs less.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from setuptools import setup
from torch.utils import cpp_extension

if TYPE_CHECKING:
    from collections.abc import Callable

    from setuptools import Extension

CSRC = Path("csrc")
# What is compiled together, without what needs CUDA; see Note [Files compiled together].
TOGETHER = {
    "entity": ("entity/*.cpp",),
    "base": ("extension/base/*.cpp", "extension/trace/*.cpp", "extension/memory/*.cpp"),
    "transfer": ("extension/transfer/*.cpp",),
    "policy": ("extension/policy/*.cpp",),
    "access": ("extension/access/[A-N]*.cpp",),
    "access_ops": ("extension/access/[O-Z]*.cpp",),
    "bindings": ("extension/*.cpp",),
}


def files(*patterns: str) -> list[str]:
    """Files of the core and the extension, relative to this file."""
    return sorted(str(path) for pattern in patterns for path in CSRC.glob(pattern))


def together(name: str) -> str:
    """A file that includes those of `TOGETHER`; written only where it changes, for what is newer is compiled."""
    path = Path("build", "together", f"{name}.cpp")
    text = "".join(f"#include <{Path(one).relative_to(CSRC)}>\n" for one in files(*TOGETHER[name]))
    if not path.is_file() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(path)


def has_toolkit() -> bool:
    """Whether the toolkit's headers are there; PyTorch's guess of its folder may be wrong."""
    home = cpp_extension.CUDA_HOME
    return home is not None and Path(home, "include", "cuda_runtime_api.h").is_file()


def shared_runtime() -> list[str]:
    """For a compiler that has only a static libstdc++: PyTorch's own, a second copy of it crashes beside the first."""
    compiler = os.environ.get("CXX", "c++").split()
    asked = subprocess.run([*compiler, "-print-file-name=libstdc++.so"], capture_output=True, text=True, check=False)
    return [] if asked.returncode != 0 or Path(asked.stdout.strip()).is_absolute() else ["-l:libstdc++.so.6"]


def extension() -> Extension:
    """The compiled module; without CUDA where PyTorch or the toolkit is without it."""
    with_cuda = torch.version.cuda is not None and has_toolkit()
    if torch.version.cuda is not None and not with_cuda:
        print(
            "torch-lms: PyTorch has CUDA, but expected the headers of the CUDA toolkit and found none at "
            f"{cpp_extension.CUDA_HOME}; building for the CPU only (set CUDA_HOME to build with CUDA)"
        )
    debug = os.environ.get("TORCH_LMS_DEBUG") == "1"
    # NDEBUG as PyTorch itself: without it its classes have other layouts.
    flags = ["-DNDEBUG", "-fvisibility=hidden", *(["-O0", "-g"] if debug else ["-O2", "-g0"])]
    own = files(*(pattern for patterns in TOGETHER.values() for pattern in patterns))
    sources = own if debug else [together(name) for name in TOGETHER]
    if with_cuda:
        flags.append("-DTORCH_LMS_WITH_CUDA")
        sources += files("entity/cuda/*.cpp", "extension/cuda/*.cpp")
    kind: Callable[..., Extension] = cpp_extension.CUDAExtension if with_cuda else cpp_extension.CppExtension
    return kind(
        "torch_lms._C",
        sources,
        depends=[*files("**/*.h"), *own],
        include_dirs=[str(CSRC.resolve())],
        extra_compile_args={"cxx": flags},
        extra_link_args=shared_runtime(),
    )


def add_programs_of_this_python() -> None:
    """Lets PyTorch find the ninja beside this Python also where its environment is not activated."""
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


add_programs_of_this_python()
setup(ext_modules=[extension()], cmdclass={"build_ext": cpp_extension.BuildExtension})
