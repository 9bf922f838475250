"""Step time over peak memory, ours and what a user would do instead, from the results of `benchmarks.plans` alone.

python -m benchmarks.plan_picture benchmarks/results/plans.json --output docs/plans.svg
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["SERIES", "draw"]

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Series:
    """Rows that are drawn alike.

    Attributes:
        label: in the legend.
        holds: tells them by their key.
        color: of the markers and the line.
        marker: matplotlib's word for it.
        line: whether they are joined by one.
    """

    label: str
    holds: Callable[[str], bool]
    color: str
    marker: str
    line: bool = True


def _begins(*words: str) -> Callable[[str], bool]:
    return lambda key: key.startswith(words)


def _ours(ending: str) -> Callable[[str], bool]:
    return lambda key: key.startswith("ours-") and key.endswith(f"-{ending}") and key.count("-") == 2


SERIES = (
    Series(
        label="ours", holds=lambda key: key.startswith("ours-") and key.count("-") == 1, color="#c0392b", marker="o"
    ),
    Series(label="ours, swap only", holds=_ours("swap"), color="#e6a19a", marker="v"),
    Series(label="ours, recompute only", holds=_ours("recompute"), color="#e6a19a", marker="^"),
    Series(label="ours, on demand", holds=_ours("demand"), color="#e6a19a", marker="x"),
    Series(label="plain", holds=lambda key: key == "plain", color="#222222", marker="*", line=False),
    Series(label="checkpoint", holds=_begins("checkpoint-"), color="#4c8fd0", marker="s"),
    Series(label="selective checkpoint", holds=_begins("selective-"), color="#59a869", marker="D"),
    Series(label="torch.compile, memory budget", holds=_begins("compiled-"), color="#8e6bbf", marker="P"),
    Series(label="save_on_cpu", holds=lambda key: key == "save_on_cpu", color="#9aa5b1", marker="<", line=False),
    Series(label="TRL OffloadActivations", holds=lambda key: key == "trl", color="#d9a441", marker=">", line=False),
)
_TICKS = (0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.5, 2, 3, 4, 5, 6, 8, 10)


def draw(document: Mapping[str, Any], path: Path) -> list[str]:
    """Draws a results file.

    Args:
        document: what the benchmark wrote.
        path: of the picture: .svg, .png or .pdf.

    Returns:
        The labels of the series that were drawn.

    Raises:
        ValueError: if the plain row is missing, by which the others are divided.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in document["rows"] if "error" not in row]
    plain = next((row for row in rows if row["key"] == "plain"), None)
    if plain is None:
        raise ValueError("expected a row with the key 'plain', found none; run benchmarks.plans --only plain")
    with matplotlib.rc_context({"svg.hashsalt": "plans", "svg.fonttype": "none"}):
        figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
        drawn = [series.label for series in SERIES if _draw_series(axes, series, rows)]
        _dress(axes, [row["ratio"] for row in rows if row.get("ratio")])
        axes.set_title(document["title"], fontsize=11)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        pyplot.close(figure)
    return drawn


def _draw_series(axes: Any, series: Series, rows: Sequence[Row]) -> bool:
    """Draws the rows that a series holds, if there are any."""
    mine = [row for row in rows if series.holds(row["key"]) and row.get("ratio")]
    points = sorted((row["peak_gib"], row["ratio"]) for row in mine)
    if points:
        across, up = zip(*points, strict=True)
        ours = series.label == "ours"
        axes.plot(
            across,
            up,
            color=series.color,
            marker=series.marker,
            linestyle="-" if series.line else "none",
            linewidth=2.2 if ours else 1.2,
            markersize=8 if ours else 6,
            zorder=3 if ours else 2,
            label=series.label,
        )
    return bool(points)


def _dress(axes: Any, ratios: Sequence[float]) -> None:
    """Axes, ticks and the legend."""
    least, most = min(ratios), max(ratios)
    axes.set_yscale("log")
    axes.set_ylim(least / 1.03, most * 1.05)
    axes.set_yticks([tick for tick in _TICKS if least / 1.03 <= tick <= most * 1.05])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.yaxis.minorticks_off()
    axes.axhline(1.0, color="#222222", linewidth=0.8, linestyle=":")
    axes.set_xlim(left=0)
    axes.set_xlabel("peak memory of tensors (GiB)")
    axes.set_ylabel("step time / plain")
    axes.grid(visible=True, linewidth=0.4, alpha=0.6)
    axes.legend(fontsize=9, frameon=False)


def main() -> None:
    """Draws the file that the command names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="the JSON file of benchmarks.plans")
    parser.add_argument("--output", type=Path, required=True, help="a .svg, .png or .pdf file")
    given = parser.parse_args()
    drawn = draw(json.loads(given.results.read_text()), given.output)
    print(f"wrote {given.output.name}: {', '.join(drawn)}")


if __name__ == "__main__":
    main()
