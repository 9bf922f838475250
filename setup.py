"""Builds ``torch_lms._C`` against the installed PyTorch, with CUDA where it has CUDA."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from setuptools import setup
from torch.utils import cpp_extension

CSRC = Path("csrc")


def sources(with_cuda: bool) -> list[str]:
    """Every C++ file of the core and the extension, relative to this file."""
    patterns = ["entity/*.cpp", "extension/*.cpp"]
    if with_cuda:
        patterns += ["entity/cuda/*.cpp", "extension/cuda/*.cpp"]
    return sorted(str(path) for pattern in patterns for path in CSRC.glob(pattern))


def extension() -> object:
    """The compiled module; without CUDA where PyTorch or the toolkit is without it."""
    with_cuda = torch.version.cuda is not None and cpp_extension.CUDA_HOME is not None
    if torch.version.cuda is not None and not with_cuda:
        print("torch-lms: PyTorch has CUDA, but no CUDA toolkit was found (set CUDA_HOME): building for the CPU only")
    debug = os.environ.get("TORCH_LMS_DEBUG") == "1"
    # NDEBUG as PyTorch itself: without it its classes have other layouts.
    flags = ["-DNDEBUG", "-fvisibility=hidden", *(["-O0", "-g"] if debug else ["-O2", "-g0"])]
    if with_cuda:
        flags.append("-DTORCH_LMS_WITH_CUDA")
    kind = cpp_extension.CUDAExtension if with_cuda else cpp_extension.CppExtension
    return kind(
        "torch_lms._C",
        sources(with_cuda),
        include_dirs=[str(CSRC.resolve())],
        extra_compile_args={"cxx": flags},
    )


setup(ext_modules=[extension()], cmdclass={"build_ext": cpp_extension.BuildExtension})
