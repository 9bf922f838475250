#!/usr/bin/env python3
"""Links a library of the lean profile; CMake puts it in front of the linker's command.

    link.py LIST COMMAND...

Functions of PyTorch that are still called, though their files are left out (left_out.txt), are defined here: each
passes its name to torch_lms_left_out (left_out.cpp), which throws. LIST gets their names. Anything else that is
undefined is an error; but the interpreter has Python's own symbols.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

UNDEFINED = re.compile(r"undefined references? to `([^'@]+)'")
# Functions of the namespaces at and torch; no data, and nothing that another library should have.
FUNCTION = re.compile(r"_ZNK?(2at|5torch)(?!.*_stubE$)")
STUB = """.section .rodata
name{number}: .asciz "{symbol}"
.text
.globl {symbol}
.type {symbol}, @function
{symbol}:
  lea name{number}(%rip), %rdi
  jmp torch_lms_left_out@PLT
"""
PYTHON = re.compile(r"_?Py[A-Z_]")
NO_EXECUTABLE_STACK = '.section .note.GNU-stack,"",@progbits\n'


def undefined_symbols(command: list[str]) -> list[str]:
    """Links, and names what is missing, but for Python's; with the linker's words, exits if something else is wrong."""
    run = subprocess.run(
        [*command, "-Wl,-z,defs", "-Wl,--no-demangle"],
        env={**os.environ, "LC_ALL": "C"},
        stderr=subprocess.PIPE,
        text=True,
    )
    symbols = sorted(set(UNDEFINED.findall(run.stderr)))
    if run.returncode != 0 and not symbols:
        sys.exit(run.stderr)
    return [symbol for symbol in symbols if not PYTHON.match(symbol)]


def demangled(symbols: list[str]) -> str:
    """The symbols as C++ has them, one a line."""
    return subprocess.run(
        ["c++filt"], input="".join(f"{symbol}\n" for symbol in symbols), stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def link(names: Path, command: list[str]) -> None:
    """Links once to see what is missing, and again with it."""
    symbols = undefined_symbols(command)
    others = [symbol for symbol in symbols if not FUNCTION.match(symbol)]
    if others:
        sys.exit(
            "torch-lms: expected that only functions of PyTorch are left out, found undefined:\n"
            f"{demangled(others)}take the files that define them out of build_scripts/lean_cuda/left_out.txt"
        )
    names.write_text(demangled(symbols))
    source, stubs = names.with_suffix(".S"), names.with_suffix(".o")
    code = "".join(STUB.format(number=number, symbol=symbol) for number, symbol in enumerate(symbols))
    source.write_text(code + NO_EXECUTABLE_STACK)
    subprocess.run([command[0], "-c", "-fPIC", str(source), "-o", str(stubs)], check=True)
    subprocess.run([*command, str(stubs)], check=True)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(f"torch-lms: expected LIST COMMAND..., found {sys.argv[1:]}; see the first lines of {sys.argv[0]}")
    link(Path(sys.argv[1]), sys.argv[2:])
