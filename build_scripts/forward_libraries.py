#!/usr/bin/env python3
"""Makes small libraries that pass calls on to those of a later CUDA, for a machine that has only them.

    forward_libraries.py FOLDER OLD=NEW... --for FILE...

OLD is a library of CUDA 11.8 that the FILEs are linked to, NEW the name of the one that a machine has in its place:
lib64/libcublas.so.11=libcublas.so.13. FOLDER gets a library with OLD's name and symbol versions, and with those of its
functions that the FILEs call. Each jumps to NEW's function of the same name, which must take the same arguments: for
cuBLAS and NVRTC compare the headers. A function that NEW is without ends the program with its name.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from pathlib import Path

TEMPLATE = r"""
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

static const char* const names[] = {%(names)s};
__attribute__((visibility("hidden"))) void* forwarded_functions[sizeof names / sizeof *names];

static void missing(void) {
  fprintf(stderr, "torch-lms: expected no call of a function that %(new)s is without, found one; see the list above\n");
  abort();
}

__attribute__((constructor)) static void find(void) {
  void* library = dlopen("%(new)s", RTLD_NOW);
  if (library == NULL) {
    fprintf(stderr, "torch-lms: expected %(new)s, found none (%%s); name its folder in LD_LIBRARY_PATH\n", dlerror());
    exit(1);
  }
  for (size_t i = 0; i < sizeof names / sizeof *names; ++i) {
    forwarded_functions[i] = dlsym(library, names[i]);
    if (forwarded_functions[i] == NULL) {
      fprintf(stderr, "torch-lms: %(new)s is without %%s\n", names[i]);
      forwarded_functions[i] = (void*)missing;
    }
  }
}
"""
JUMP = 'asm(".text\\n.globl {name}\\n.type {name}, @function\\n{name}: jmp *forwarded_functions+{offset}(%rip)");\n'


def symbols(file: Path, which: str) -> dict[str, str]:
    """A library's dynamic symbols and their versions; `which` is an option of nm."""
    listed = subprocess.run(
        ["nm", "-D", "--with-symbol-versions", which, str(file)], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    parts = [line.split()[-1].partition("@") for line in listed.splitlines()]
    return {name: version.lstrip("@") for name, _, version in parts if name != version}


def forward(old: Path, new: str, called: set[str], folder: Path) -> int:
    """Writes one library; returns how many functions it has."""
    versions = {name: version for name, version in symbols(old, "--defined-only").items() if name in called}
    names = sorted(versions)
    if not names:
        raise SystemExit(f"torch-lms: expected calls of {old.name}, found none; leave {old.name}={new} out")
    source = TEMPLATE % {"names": ", ".join(f'"{name}"' for name in names), "new": new}
    source += "".join(JUMP.format(name=name, offset=8 * number) for number, name in enumerate(names))
    script = "".join(
        f"{version} {{ global: {' '.join(f'{name};' for name in names if versions[name] == version)} }};\n"
        for version in sorted(set(versions.values()))
        if version
    )
    with tempfile.TemporaryDirectory() as work:
        files = Path(work, "forward.c"), Path(work, "forward.map")
        files[0].write_text(source)
        files[1].write_text(script)
        command = [
            os.environ.get("CC", "cc"),
            "-shared",
            "-fPIC",
            "-O1",
            "-s",
            str(files[0]),
            f"-Wl,-soname,{old.name}",
        ]
        if script:
            command.append(f"-Wl,--version-script={files[1]}")
        subprocess.run([*command, "-o", str(folder / old.name), "-ldl"], check=True)
    return len(names)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("libraries", nargs="+", metavar="OLD=NEW")
    parser.add_argument("--for", dest="files", nargs="+", type=Path, required=True, metavar="FILE")
    options = parser.parse_args()
    called = {name for file in options.files for name in symbols(file, "--undefined-only")}
    options.folder.mkdir(parents=True, exist_ok=True)
    for pair in options.libraries:
        old, _, new = pair.partition("=")
        if not new or not Path(old).is_file():
            parser.error(f"expected OLD=NEW with a library that is there, found {pair}")
        print(f"{Path(old).name}: {forward(Path(old), new, called, options.folder)} functions of {new}")


if __name__ == "__main__":
    main()
