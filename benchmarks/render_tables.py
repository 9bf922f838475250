"""Fills README.md and docs/results.md from ``benchmarks/results/*.json``, so that no figure is written by hand.

A pair of markers names the files whose tables stand between them, and if need be a word of the rows (their first cell
has it) and the columns of each by their keys:

    <!-- results:begin transfers plans[ours] gpt:limit,step_ms -->
    <!-- results:end -->

A table is a file's ``title``, its ``columns`` (key, heading, format) and its ``rows``, with the command and the machine
below; where rows have a ``command`` and a ``commit`` of their own, with those of all rows that are shown. A row with
none of the columns but the first is left out; one without a column's key has an empty cell there.

    python benchmarks/render_tables.py           # writes both
    python benchmarks/render_tables.py --check   # fails if one is not what it would write
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["fill", "render_results", "render_table"]

_ROOT = Path(__file__).resolve().parent.parent
_MARKED = re.compile(r"(<!-- results:begin (?P<names>[^>]*?) ?-->\n).*?(<!-- results:end -->)", re.DOTALL)
_MARKER = re.compile(r"<!-- results:(begin|end)")
_WORD = re.compile(r"(?P<name>[^:\[]*)(\[(?P<rows>[^\]]*)\])?(:(?P<keys>.*))?")
_FILLED = ("README.md", "docs/results.md")
_NUMBERS = (int, float)
_GIB = 1 << 30


def render_table(columns: Sequence[Sequence[str]], rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table; columns of numbers are set to the right.

    Args:
        columns: key, heading and format (as of `str.format`) of each.
        rows: values by key.
    """
    headings = [heading for _, heading, _ in columns]
    rules = ["---:" if _is_number(rows, key) else "---" for key, _, _ in columns]
    cells = [[_cell(row.get(key), form) for key, _, form in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in (headings, rules, *cells))


def render_results(folder: Path, names: Sequence[str]) -> str:
    """The tables of results in a folder.

    Args:
        folder: of the JSON files.
        names: of the files, without ``.json``; ``name:key,key`` for some of the columns, ``name[word]`` for some of the
            rows.

    Raises:
        ValueError: if there is no such file, or no such column or row in it.
    """
    parts = []
    for word in names:
        name, some, keys = _parts(word)
        path = folder / f"{name}.json"
        if not path.is_file():
            raise ValueError(f"expected the results of a benchmark in {path}, found none; run the benchmark")
        document = json.loads(path.read_text())
        columns = _columns(document["columns"], keys.split(",") if keys else None, word)
        shown = [row for row in document["rows"] if any(row.get(key) is not None for key, _, _ in columns[1:])]
        shown = [row for row in shown if some in str(row.get(columns[0][0]))]
        if some and not shown:
            raise ValueError(f"expected rows with {some!r} in {path}, found none; leave the word out")
        parts += [
            f"**{document.get('title') or document['name']}**",
            render_table(columns, shown),
            _source(document, shown),
        ]
    return "\n\n".join(parts)


def _parts(word: str) -> tuple[str, str, str]:
    """Name, word of the rows, and keys; empty where they are not given."""
    found = _WORD.fullmatch(word)
    if found is None:
        raise ValueError(f"expected name, name[word] or name:key,key between the markers, found {word!r}")
    return found["name"], found["rows"] or "", found["keys"] or ""


def _source(document: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """What has made a table."""
    commands = list(dict.fromkeys(row["command"] for row in rows if "command" in row)) or [document["command"]]
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows if "commit" in row))
    environment = {**document["environment"], **({"commit": commits} if commits else {})}
    return f"{', '.join(f'`{command}`' for command in commands)} on {_describe(environment)}."


def fill(text: str, folder: Path) -> str:
    """A text with results between its markers, in place of what is there.

    Raises:
        ValueError: if the markers do not come in pairs, or name what is not there.
    """
    if len(_MARKER.findall(text)) != 2 * len(_MARKED.findall(text)):
        raise ValueError(
            "expected pairs of <!-- results:begin NAME ... --> and <!-- results:end -->, found others; put them right"
        )
    return _MARKED.sub(lambda at: f"{at[1]}{render_results(folder, at['names'].split())}\n{at[3]}", text)


def _columns(columns: Sequence[Sequence[str]], keys: Sequence[str] | None, word: str) -> list[Sequence[str]]:
    if keys is None:
        return list(columns)
    by_key = {column[0]: column for column in columns}
    if missing := [key for key in keys if key not in by_key]:
        raise ValueError(f"expected columns out of {', '.join(by_key)} in {word!r}, found {', '.join(missing)}")
    return [by_key[key] for key in keys]


def _is_number(rows: Sequence[Mapping[str, Any]], key: str) -> bool:
    values = [row[key] for row in rows if row.get(key) is not None]
    return bool(values) and all(isinstance(value, _NUMBERS) and not isinstance(value, bool) for value in values)


def _cell(value: Any, form: str) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    return form.format(value).replace("|", "\\|")


def _describe(environment: Mapping[str, Any]) -> str:
    """The machine in words: the GPU or the processors, and the versions."""
    words = []
    if environment.get("gpu"):
        count = environment.get("gpu_count", 1)
        words.append(f"{count} x {environment['gpu']}")
        if "gpu_bytes" in environment:
            words[-1] += f" ({environment['gpu_bytes'] / _GIB:.0f} GiB)"
    elif environment.get("cpu_count"):
        words.append(f"{environment['cpu_count']} CPU cores")
    words += [f"{name} {environment[name]}" for name in ("torch", "cuda", "driver", "commit") if environment.get(name)]
    return ", ".join(words)


def main() -> int:
    """Writes or checks the files; returns the exit status."""
    parser = argparse.ArgumentParser(description="Fills in results from benchmarks/results.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file would change")
    given = parser.parse_args()
    status = 0
    for path in (_ROOT / name for name in _FILLED):
        text = path.read_text()
        filled = fill(text, _ROOT / "benchmarks" / "results")
        if filled != text and given.check:
            print(f"{path.name} does not show what benchmarks/results has; run python benchmarks/render_tables.py")
            status = 1
        elif filled != text:
            path.write_text(filled)
    return status


if __name__ == "__main__":
    sys.exit(main())
