"""The lean profile for CUDA: functions whose files are left out throw, and say so."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LEAN_CUDA = Path(__file__).resolve().parents[2] / "build_scripts" / "lean_cuda"
CALLER = "namespace at { namespace native { int left_out(int, double); } }\n"
CALLER += 'extern "C" int call() { return at::native::left_out(1, 2.0); }\n'
THROWER = "#include <string>\nstatic std::string said;\n"
THROWER += 'extern "C" [[noreturn]] void torch_lms_left_out(const char* name) { throw std::string(name); }\n'
THROWER += 'extern "C" int call();\nextern "C" const char* caught() {\n'
THROWER += "  try { call(); } catch (const std::string& name) { said = name; }\n  return said.c_str();\n}\n"

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def link(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    """Links a library of this source through link.py."""
    (folder / "source.cpp").write_text(source)
    command = ["g++", "-shared", "-fPIC", str(folder / "source.cpp"), "-o", str(folder / "library.so")]
    return subprocess.run(
        [sys.executable, str(LEAN_CUDA / "link.py"), str(folder / "names.txt"), *command],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_call_of_what_is_left_out_throws_its_name(tmp_path: Path) -> None:
    linked = link(tmp_path, CALLER + THROWER)
    assert linked.returncode == 0, linked.stderr
    assert (tmp_path / "names.txt").read_text() == "at::native::left_out(int, double)\n"
    library = ctypes.CDLL(str(tmp_path / "library.so"))
    library.caught.restype = ctypes.c_char_p
    assert library.caught() == b"_ZN2at6native8left_outEid"


def test_a_library_that_misses_nothing_is_linked_as_it_is(tmp_path: Path) -> None:
    linked = link(tmp_path, 'extern "C" int call() { return 1; }\n')
    assert linked.returncode == 0, linked.stderr
    assert (tmp_path / "names.txt").read_text() == ""
    assert ctypes.CDLL(str(tmp_path / "library.so")).call() == 1


def test_symbols_of_python_are_left_to_the_interpreter(tmp_path: Path) -> None:
    python = 'extern "C" void PyErr_Clear(); extern "C" int _Py_none; void forget() { PyErr_Clear(); _Py_none = 1; }\n'
    linked = link(tmp_path, CALLER + THROWER + python)
    assert linked.returncode == 0, linked.stderr
    assert (tmp_path / "names.txt").read_text() == "at::native::left_out(int, double)\n"


@pytest.mark.parametrize(
    "missing",
    [
        "int other(); int call() { return other(); }",
        "namespace at { extern int kernel_stub; } int* p = &at::kernel_stub;",
    ],
)
def test_what_is_no_function_of_pytorch_stops_the_link(missing: str, tmp_path: Path) -> None:
    linked = link(tmp_path, missing)
    assert linked.returncode == 1
    assert "other()" in linked.stderr or "kernel_stub" in linked.stderr
    assert "left_out.txt" in linked.stderr


def test_what_training_needs_is_not_left_out() -> None:
    lines = (LEAN_CUDA / "left_out.txt").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    native = "/x/aten/src/ATen/native/cuda"
    needed = [
        f"{native}/{name}.cu" for name in ("layer_norm_kernel", "SoftMax", "Embedding", "Indexing", "Normalization")
    ]
    needed += ["/x/aten/src/ATen/cuda/CUDASwapDevice.cpp", "/x/build/aten/src/ATen/RegisterCUDA.cpp"]
    assert patterns
    for pattern in patterns:
        assert not [path for path in needed if re.search(f"/{pattern}$", path)], pattern
    assert any(re.search(f"/{pattern}$", f"{native}/AveragePool3d.cu") for pattern in patterns)
