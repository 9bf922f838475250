"""Libraries that pass calls on to a later version's: arguments, versions, and what is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "build_scripts" / "forward_libraries.py"
BOTH = "double twice(double x, int n) { return %d * x * n; }\n"
MAIN = "double twice(double, int); int gone(void);\n"
MAIN += "int main(int c, char** v) { return c > 1 ? gone() : (int)twice(2.5, 2); }\n"

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


def build(folder: Path, name: str, source: str, *options: str) -> Path:
    """Compiles C."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.with_suffix(".c").write_text(source)
    subprocess.run(["gcc", str(path.with_suffix(".c")), "-fPIC", "-o", str(path), *options], check=True, timeout=60)
    return path


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program that is linked to old/libx.so.1, beside new/libx.so.2 and what forwards the one to the other."""
    (tmp_path / "old").mkdir()
    (tmp_path / "map").write_text("libx.so.1 { global: *; };\n")
    script = f"-Wl,-soname,libx.so.1,--version-script={tmp_path / 'map'}"
    old = build(tmp_path / "old", "libx.so.1", BOTH % 1 + "int gone(void) { return 7; }\n", "-shared", script)
    build(tmp_path / "new", "libx.so.2", BOTH % 3, "-shared", "-Wl,-soname,libx.so.2")
    found = build(tmp_path, "program", MAIN, str(old))
    made = subprocess.run(
        [sys.executable, SCRIPT, tmp_path / "forward", f"{old}=libx.so.2", "--for", found],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert made.stdout == "libx.so.1: 2 functions of libx.so.2\n", made.stderr
    return found


def call(program: Path, folders: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the program with these folders of libraries."""
    path = ":".join(str(program.parent / name) for name in folders.split())
    environment = {**os.environ, "LD_LIBRARY_PATH": path}
    return subprocess.run([program, *arguments], capture_output=True, text=True, env=environment, timeout=60)


def test_calls_reach_the_later_library(program: Path) -> None:
    assert call(program, "old").returncode == 5
    assert call(program, "forward new").returncode == 15


def test_a_call_of_what_the_later_one_is_without_ends_the_program(program: Path) -> None:
    ended = call(program, "forward new", "gone")
    assert ended.returncode < 0
    assert "libx.so.2 is without gone" in ended.stderr


def test_a_later_library_that_is_not_there_is_named(program: Path) -> None:
    ended = call(program, "forward")
    assert ended.returncode == 1
    assert "expected libx.so.2, found none" in ended.stderr


def test_a_library_that_is_not_called_is_refused(tmp_path: Path) -> None:
    old = build(tmp_path / "old", "libx.so.1", BOTH % 1, "-shared")
    other = build(tmp_path, "other", "int main() { return 0; }\n")
    failed = subprocess.run(
        [sys.executable, SCRIPT, tmp_path, f"{old}=libx.so.2", "--for", other],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert failed.returncode == 1
    assert "expected calls of libx.so.1, found none" in failed.stderr
