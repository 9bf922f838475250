"""Reads Dockerfiles, as far as those of this project go: instructions, variables, stages, what a COPY leaves out."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

KNOWN = ("ARG", "CMD", "COPY", "ENV", "FROM", "LABEL", "RUN", "USER", "WORKDIR")
_VARIABLE = re.compile(r"\\(.)|\$(\w+)|\$\{(\w+)(?::-([^}]*))?\}")
_PAIR = re.compile(r"(\w+)(?:=(\"(?:[^\"\\]|\\.)*\"|'[^']*'|\S*))?")


@dataclass(frozen=True)
class Instruction:
    """One instruction, its continuation lines joined."""

    line: int
    name: str
    value: str

    def __str__(self) -> str:
        return f"{self.name} {self.value}"


@dataclass
class Stage:
    """A FROM, and what follows until the next."""

    base: str
    name: str
    instructions: list[Instruction] = field(default_factory=list)


def read_instructions(text: str) -> list[Instruction]:
    """The instructions of a Dockerfile, without comments.

    Raises:
        ValueError: An instruction is not among those that are known here.
    """
    found: list[Instruction] = []
    pending, begin = "", 0
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        begin = begin or number
        if line.endswith("\\"):
            pending += line[:-1].rstrip() + " "
            continue
        name, _, value = (pending + line).partition(" ")
        if name.upper() not in KNOWN:
            raise ValueError(
                f"expected one of {', '.join(KNOWN)}, found '{name}' in line {begin}; "
                "use one of these, or teach it to build_scripts/dockerfile.py"
            )
        found.append(Instruction(begin, name.upper(), value.strip()))
        pending, begin = "", 0
    if pending:
        raise ValueError(f"expected a line after the backslash that ends line {begin}, found the end; take it away")
    return found


def substitute(text: str, variables: dict[str, str]) -> str:
    """The text with $NAME, ${NAME} and ${NAME:-default} replaced; a variable that is not set is empty."""

    def value(match: re.Match[str]) -> str:
        escaped, plain, braced, default = match.groups()
        if escaped is not None:
            return str(escaped)
        return variables.get(plain or braced) or default or ""

    return _VARIABLE.sub(value, text)


def read_pairs(text: str) -> dict[str, str | None]:
    """NAME=VALUE pairs of an ENV, an ARG or a LABEL; None where there is no value."""
    return {
        match[1]: None if match[2] is None else re.sub(r"^([\"'])(.*)\1$", r"\2", match[2])
        for match in _PAIR.finditer(text)
    }


def read_stages(text: str, arguments: dict[str, str]) -> tuple[list[Stage], dict[str, str]]:
    """The stages of a Dockerfile, and the arguments that stand before the first.

    Args:
        text: The Dockerfile.
        arguments: What --build-arg would say.
    """
    stages: list[Stage] = []
    before: dict[str, str] = {}
    for instruction in read_instructions(text):
        if instruction.name == "FROM":
            words = substitute(instruction.value, before).split()
            if len(words) not in (1, 3) or (len(words) == 3 and words[1].upper() != "AS"):
                raise ValueError(f"expected FROM IMAGE [AS NAME] in line {instruction.line}, found '{instruction}'")
            stages.append(Stage(words[0], words[2] if len(words) == 3 else str(len(stages))))
        elif stages:
            stages[-1].instructions.append(instruction)
        elif instruction.name == "ARG":
            pairs = read_pairs(substitute(instruction.value, before))
            before.update({name: arguments.get(name, value or "") for name, value in pairs.items()})
        else:
            raise ValueError(f"expected FROM or ARG first, found '{instruction}' in line {instruction.line}")
    if not stages:
        raise ValueError("expected a FROM, found none")
    return stages, before


def read_mounts(value: str) -> tuple[list[dict[str, str]], str]:
    """The --mount options of a RUN, and its command."""
    mounts: list[dict[str, str]] = []
    while value.startswith("--"):
        option, _, value = value.partition(" ")
        mount = dict(part.partition("=")[::2] for part in option.removeprefix("--mount=").split(","))
        if not option.startswith("--mount=") or mount.get("type") not in ("bind", "cache") or "target" not in mount:
            raise ValueError(f"expected --mount=type=bind or cache, with a target, found '{option}'")
        mounts.append(mount)
        value = value.lstrip()
    return mounts, value


class IgnoredFiles:
    """What .dockerignore keeps away from a COPY: the last line that matches a path or a folder of it counts."""

    def __init__(self, text: str) -> None:
        lines = [line.strip() for line in text.splitlines()]
        self._rules = [
            (not line.startswith("!"), self._pattern(line.removeprefix("!").strip("/")))
            for line in lines
            if line and not line.startswith("#")
        ]

    @classmethod
    def of(cls, context: Path) -> IgnoredFiles:
        """Those of a folder."""
        path = context / ".dockerignore"
        return cls(path.read_text() if path.exists() else "")

    def __contains__(self, path: PurePosixPath) -> bool:
        ignored = False
        for ignores, pattern in self._rules:
            if any(pattern.fullmatch(str(part)) for part in (path, *path.parents)):
                ignored = ignores
        return ignored

    @staticmethod
    def _pattern(line: str) -> re.Pattern[str]:
        parts = re.split(r"(\*\*/|\*\*|\*|\?)", line)
        kinds = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
        return re.compile("".join(kinds.get(part, re.escape(part)) for part in parts))
