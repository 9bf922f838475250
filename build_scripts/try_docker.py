#!/usr/bin/env python3
"""Carries a Dockerfile out without a Docker engine, in roots made with debootstrap.

    build_scripts/try_docker.py DOCKERFILE ROOTS [--target STAGE] [--build-arg NAME=VALUE]...
                                [--add FOLDER=PATH]... [--mount PATH]... [--env NAME=VALUE]... [--mirror SUITE=URL]...

What is tried is the very text of the Dockerfile: each stage becomes a root of its own in ROOTS, its instructions are
carried out there in order, and at the end the CMD runs as the USER. In place of an image stands the distribution
that it is made of.

--target STAGE     ends with this stage, without its CMD
--build-arg        as for docker build
--add FOLDER=PATH  copies what an image has beyond its distribution: a Python to /usr/local, for example
--mount PATH       shows a folder of this machine, read-only, to every RUN: wheels, a proxy's certificate
--env NAME=VALUE   sets a variable in every RUN, as the machine of a Docker engine does for a proxy
--mirror SUITE=URL where a distribution comes from; debootstrap has its own. Without the distribution's keys, by HTTPS

Needs root and debootstrap. A stage begins anew in every run; distributions and caches in ROOTS are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from dockerfile import IgnoredFiles, Instruction, Stage, read_mounts, read_pairs, read_stages, substitute

PROJECT = Path(__file__).resolve().parents[1]
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# How an image's name tells the distribution, its components, and the keys that sign it.
DISTRIBUTIONS = {
    "bookworm": ("bookworm", "main", "debian-archive-keyring.gpg"),
    "ubuntu22.04": ("jammy", "main,universe", "ubuntu-archive-keyring.gpg"),
}
KEYRINGS = Path("/usr/share/keyrings")


@dataclass
class Options:
    """What the command line says."""

    roots: Path
    arguments: dict[str, str]
    added: dict[str, str]
    mounts: list[Path]
    environment: dict[str, str] = field(default_factory=dict)
    mirrors: dict[str, str] = field(default_factory=dict)


@dataclass
class State:
    """What the instructions of a stage have set so far."""

    root: Path
    folder: str = "/"
    user: str = "root"
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    arguments: dict[str, str] = field(default_factory=dict)
    before: dict[str, str] = field(default_factory=dict)
    command: str = ""

    def variables(self) -> dict[str, str]:
        """What $NAME can name; an ENV hides an ARG."""
        return {**self.arguments, **self.environment}

    def inside(self, path: str) -> Path:
        """Where a path of the image lies on this machine."""
        return self.root / (PurePosixPath(self.folder) / path).relative_to("/")


def run(*words: str | Path) -> None:
    """Runs a program of this machine."""
    subprocess.run([str(word) for word in words], check=True)


def make_distribution(image: str, options: Options) -> Path:
    """The root of the distribution that an image is made of; made if it is not there."""
    known = [value for name, value in DISTRIBUTIONS.items() if name in image]
    if not known:
        raise ValueError(f"expected an image of {', '.join(DISTRIBUTIONS)}, found '{image}'; add it to DISTRIBUTIONS")
    suite, components, keys = known[0]
    mirror = options.mirrors.get(suite)
    root = options.roots / f"distribution-{suite}"
    if not root.exists():
        # Its own name only once it is complete.
        begun = root.with_suffix(".begun")
        shutil.rmtree(begun, ignore_errors=True)
        trust = []
        if not (KEYRINGS / keys).exists():  # HTTPS instead
            if mirror is None or not mirror.startswith("https:"):
                raise ValueError(
                    f"expected {keys} in {KEYRINGS} or a mirror of {suite} by HTTPS, found neither; install the keys "
                    f"or name a mirror: --mirror {suite}=https://..."
                )
            trust = ["--no-check-gpg", "--include=ca-certificates"]
        place = [mirror] if mirror else []  # debootstrap has its own
        run("debootstrap", "--variant=minbase", f"--components={components}", *trust, suite, begun, *place)
        begun.rename(root)
    return root


def command_in(state: State, mounts: list[tuple[Path, str, bool]], words: list[str]) -> list[str]:
    """A command that runs in a root with these mounts: (path here, path there, read-only).

    The mounts are those of a namespace that ends with the command.
    """
    script = ["set -e"]
    binds = [(Path("/proc"), "/proc", False), (Path("/dev"), "/dev", False), *mounts]
    for here, there, read_only in binds:
        target = state.root / there.lstrip("/")
        if here.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()
        script.append(f"mount --rbind {shlex.quote(str(here))} {shlex.quote(str(target))}")
        if read_only:
            script.append(f"mount -o remount,bind,ro {shlex.quote(str(target))}")
    home = home_of(state)
    environment = [f"{name}={value}" for name, value in ({"HOME": home} | state.variables()).items()]
    chroot = ["chroot", f"--userspec={state.user}", str(state.root)]
    script.append("exec " + shlex.join([*chroot, "env", "-i", "-C", state.folder, *environment, *words]))
    return ["unshare", "--mount", "--propagation", "private", "bash", "-c", "\n".join(script)]


def home_of(state: State) -> str:
    """The home of the user, as /etc/passwd of the root has it."""
    for line in (state.root / "etc/passwd").read_text().splitlines():
        name, _, number, _, _, home, _ = line.split(":")
        if state.user.split(":")[0] in (name, number):
            return home
    return "/"


def run_command(state: State, value: str, options: Options, roots: dict[str, Path]) -> None:
    """A RUN, or the CMD."""
    requested, command = read_mounts(value)
    mounts = [(path, str(path), True) for path in options.mounts]
    for mount in requested:
        target = substitute(mount["target"], state.variables())
        if mount["type"] == "cache":
            cache = options.roots / "cache" / target.strip("/").replace("/", "-")
            cache.mkdir(parents=True, exist_ok=True)
            mounts.append((cache, target, False))
        else:
            whole = roots[mount["from"]] if "from" in mount else PROJECT
            mounts.append((whole / mount.get("source", ".").lstrip("/"), target, True))
    words = json.loads(command) if command.startswith("[") else ["/bin/sh", "-c", command]
    words = ["env", *(f"{name}={text}" for name, text in options.environment.items()), *words]
    subprocess.run(command_in(state, mounts, words), check=True)


def copy(state: State, value: str, roots: dict[str, Path]) -> None:
    """A COPY from the context, or from another stage."""
    words = substitute(value, state.variables()).split()
    stage = words.pop(0).removeprefix("--from=") if words[0].startswith("--from=") else None
    if words[0].startswith("--") or len(words) < 2:
        raise ValueError(f"expected COPY [--from=STAGE] SOURCE... TARGET, found 'COPY {value}'")
    *sources, target_name = words
    target = state.inside(target_name)
    whole = PROJECT if stage is None else roots[stage]
    ignored = IgnoredFiles.of(PROJECT) if stage is None else IgnoredFiles("")
    for source in sources:
        path = whole / source.lstrip("/")
        if not path.exists() or PurePosixPath(source) in ignored:
            raise ValueError(f"expected '{source}' to copy, found none (or .dockerignore leaves it out)")
        if stage is not None:
            target.mkdir(parents=True, exist_ok=True)
            run("cp", "--archive", f"{path}/." if path.is_dir() else path, target)
        elif path.is_dir():
            copy_folder(path, target, ignored)
        else:
            place = target / path.name if target_name.endswith("/") or len(sources) > 1 else target
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, place, follow_symlinks=False)


def copy_folder(folder: Path, target: Path, ignored: IgnoredFiles) -> None:
    """The files of a folder of the context that are not ignored; they belong to root."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and PurePosixPath(path.relative_to(PROJECT)) not in ignored:
            place = target / path.relative_to(folder)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, place, follow_symlinks=False)


def carry_out(instruction: Instruction, state: State, options: Options, roots: dict[str, Path]) -> None:
    """One instruction of a stage."""
    value = substitute(instruction.value, state.variables())
    if instruction.name == "ARG":
        for name, default in read_pairs(value).items():
            given = options.arguments.get(name, default if default is not None else state.before.get(name))
            if given is not None:
                state.arguments[name] = given
    elif instruction.name == "ENV":
        state.environment.update({name: text or "" for name, text in read_pairs(value).items()})
    elif instruction.name == "WORKDIR":
        state.folder = str(PurePosixPath(state.folder) / value)
        state.inside(".").mkdir(parents=True, exist_ok=True)
    elif instruction.name == "USER":
        state.user = value
    elif instruction.name == "COPY":
        copy(state, instruction.value, roots)
    elif instruction.name == "RUN":
        run_command(state, instruction.value, options, roots)
    elif instruction.name == "CMD":
        state.command = instruction.value


def begin_stage(stage: Stage, states: dict[str, State], options: Options) -> State:
    """A root with what the stage starts from."""
    root = options.roots / f"stage-{stage.name}"
    shutil.rmtree(root, ignore_errors=True)
    before = states.get(stage.base)
    source = before.root if before else make_distribution(stage.base, options)
    run("cp", "--archive", "--reflink=auto", source, root)
    if before:
        return replace(before, root=root, environment=dict(before.environment), arguments={})
    for folder, path in options.added.items():
        (root / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
        run("cp", "--archive", f"{folder}/.", root / path.lstrip("/"))
        run("chroot", root, "ldconfig")
    return State(root)


def try_dockerfile(dockerfile: Path, options: Options, target: str | None) -> None:
    """Every stage, up to the target."""
    stages, before = read_stages(dockerfile.read_text(), options.arguments)
    if target is not None and target not in [stage.name for stage in stages]:
        raise ValueError(f"expected one of the stages {', '.join(s.name for s in stages)}, found '{target}'")
    states: dict[str, State] = {}
    for stage in stages:
        print(f"==> FROM {stage.base} AS {stage.name}", flush=True)
        state = states[stage.name] = begin_stage(stage, states, options)
        state.before = before
        roots = {name: other.root for name, other in states.items()}
        for instruction in stage.instructions:
            start = time.monotonic()
            print(f"==> {instruction}", flush=True)
            carry_out(instruction, state, options, roots)
            print(f"<== line {instruction.line}: {time.monotonic() - start:.0f} s", flush=True)
        if stage.name == target:
            return
    if state.command:
        print(f"==> as {state.user}: CMD {state.command}", flush=True)
        run_command(state, state.command, options, roots)


def parse_options() -> tuple[Path, Options, str | None]:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("roots", type=Path)
    parser.add_argument("--target")
    parser.add_argument("--build-arg", action="append", default=[])
    parser.add_argument("--add", action="append", default=[])
    parser.add_argument("--mount", action="append", default=[], type=Path)
    parser.add_argument("--env", action="append", default=[])
    parser.add_argument("--mirror", action="append", default=[])
    found = parser.parse_args()
    pairs = []
    for given in (found.build_arg, found.add, found.env, found.mirror):
        if wrong := [pair for pair in given if "=" not in pair]:
            raise ValueError(f"expected NAME=VALUE after --build-arg and the like, found '{wrong[0]}'; see --help")
        pairs.append(dict(pair.split("=", 1) for pair in given))
    arguments, added, environment, mirrors = pairs
    options = Options(found.roots.resolve(), arguments, added, found.mount, environment, mirrors)
    return found.dockerfile, options, found.target


def main() -> int:
    """Tries the Dockerfile of the command line; returns the exit status."""
    try:
        dockerfile, options, target = parse_options()
        read_stages(dockerfile.read_text(), options.arguments)
        if os.geteuid() != 0:
            raise ValueError(f"expected to be root, found user {os.geteuid()}; become root and run it again")
        if shutil.which("debootstrap") is None:
            raise ValueError("expected the program debootstrap, found none; install it: apt-get install debootstrap")
        options.roots.mkdir(parents=True, exist_ok=True)
        try_dockerfile(dockerfile, options, target)
    except (OSError, ValueError) as error:
        print(f"torch-lms: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"torch-lms: expected the command above to succeed, found status {error.returncode}", file=sys.stderr)
        return 1
    print(f"next: docker build --file {dockerfile} .")
    return 0


if __name__ == "__main__":
    sys.exit(main())
