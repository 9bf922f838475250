"""Fills the README's results from ``benchmarks/results/*.json``, so that no figure is written by hand.

Each file whose ``readme`` is true becomes one table: its ``title``, its ``columns`` (key, heading, format) and its
``rows``, with the command and the machine below. A row without a column's key has an empty cell there.

    python benchmarks/render_tables.py           # writes README.md
    python benchmarks/render_tables.py --check   # fails if README.md is not what it would write
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["fill", "render_results", "render_table"]

_ROOT = Path(__file__).resolve().parent.parent
_BEGIN = "<!-- results:begin -->"
_END = "<!-- results:end -->"
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


def render_results(folder: Path) -> str:
    """The tables of every result in a folder that is meant for the README, in the order of their files' names."""
    parts = []
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text())
        if not document.get("readme"):
            continue
        parts += [
            f"**{document.get('title') or document['name']}**",
            render_table(document["columns"], document["rows"]),
            f"`{document['command']}` on {_describe(document['environment'])}.",
        ]
    return "\n\n".join(parts)


def fill(text: str, results: str) -> str:
    """A text with results between its two markers, in place of what is there.

    Raises:
        ValueError: if the text does not have each marker once, in order.
    """
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (begin and end) or _BEGIN in rest or _END in before + after:
        raise ValueError(f"expected {_BEGIN} and then {_END} once each, found them otherwise; put them back")
    return f"{before}{_BEGIN}\n{results}\n{_END}{after}" if results else f"{before}{_BEGIN}\n{_END}{after}"


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
    """Writes or checks README.md; returns the exit status."""
    parser = argparse.ArgumentParser(description="Fills the README's results from benchmarks/results.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if README.md would change")
    given = parser.parse_args()
    readme = _ROOT / "README.md"
    text = readme.read_text()
    filled = fill(text, render_results(_ROOT / "benchmarks" / "results"))
    if filled == text:
        return 0
    if given.check:
        print("README.md does not show what benchmarks/results has; run python benchmarks/render_tables.py")
        return 1
    readme.write_text(filled)
    return 0


if __name__ == "__main__":
    sys.exit(main())
