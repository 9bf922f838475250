"""Page-outs and page-ins against plain copies of the same bytes, in the same process, size by size.

The plain rate is that of the link: the faster of one copy for each storage and of a single copy of all bytes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

import torch_lms
from benchmarks.results import Result
from benchmarks.transfer_sizes import MIB, ONE_WAY, SIZES

WAYS = ("out", "in", "both")
_TURN = 16  # storages in each direction
COLUMNS = [
    *ONE_WAY,
    ("plain_both", "Plain both ways (GB/s)", "{:.1f}"),
    ("both", "Both ways (GB/s)", "{:.1f}"),
    ("both_ratio", "/ plain", "{:.2f}"),
]


class Link:
    """Device and pinned host memory of the same size for each direction, and a stream for each."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.device = device
        self.hosts = [torch.zeros(nbytes, dtype=torch.uint8, pin_memory=cuda) for _ in range(2)]
        self.blocks = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self.streams = [torch.cuda.Stream(device) if cuda else None for _ in range(2)]

    def copy(self, way: str, nbytes: int, count: int) -> None:
        """Submits ``count`` copies of ``nbytes`` in each direction, in turns so that both begin at once."""
        for index in range(count):
            part = slice(index * nbytes, (index + 1) * nbytes)
            if way != "in":
                with self._on(0):
                    self.hosts[0][part].copy_(self.blocks[0][part], non_blocking=True)
            if way != "out":
                with self._on(1):
                    self.blocks[1][part].copy_(self.hosts[1][part], non_blocking=True)

    def seconds(self, action: Callable[[], None]) -> float:
        """How long an action takes that is waited for."""
        self._synchronize()
        start = time.perf_counter()
        action()
        self._synchronize()
        return time.perf_counter() - start

    def _on(self, index: int) -> AbstractContextManager[Any]:
        stream = self.streams[index]
        return nullcontext() if stream is None else torch.cuda.stream(stream)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Storages:
    """Two sets of storages of one size; outside of `page` all are resident."""

    def __init__(self, nbytes: int, count: int, device: torch.device) -> None:
        self.sets = [
            [torch.full((nbytes,), index % 100, dtype=torch.uint8, device=device) for index in range(count)]
            for _ in range(2)
        ]

    def page(self, link: Link) -> dict[str, float]:
        """Seconds of each direction alone, and of both at once."""
        one, other = self.sets
        return {
            "out": link.seconds(lambda: _move(out=one)),
            "both": link.seconds(lambda: _move(out=other, back=one)),
            "in": link.seconds(lambda: _move(back=other)),
        }

    def intact(self) -> bool:
        """Whether every byte is what it was."""
        return all(bool((tensor == index % 100).all()) for tensors in self.sets for index, tensor in enumerate(tensors))


def _move(*, out: Sequence[torch.Tensor] = (), back: Sequence[torch.Tensor] = ()) -> None:
    """In turns, as plain copies are: one direction is not to begin when the other has been asked for as a whole."""
    for begin in range(0, max(len(out), len(back)), _TURN):
        torch_lms.pageout(out[begin : begin + _TURN])
        torch_lms.prefetch(back[begin : begin + _TURN])
    torch_lms.wait()


def measure(nbytes: int, count: int, link: Link, repeats: int) -> dict[str, float | str | bool]:
    """One row: medians of plain copies and of paging, taken in turns."""
    storages = Storages(nbytes, count, link.device)
    storages.page(link)  # the host pool and the allocator grow here
    seconds: dict[str, list[float]] = {}

    def note(kind: str, value: float) -> None:
        seconds.setdefault(kind, []).append(value)

    for _ in range(repeats):
        for way in WAYS:
            note(f"each {way}", link.seconds(lambda way=way: link.copy(way, nbytes, count)))  # type: ignore[misc]
            note(f"whole {way}", link.seconds(lambda way=way: link.copy(way, nbytes * count, 1)))  # type: ignore[misc]
        for way, value in storages.page(link).items():
            note(way, value)
    row: dict[str, float | str | bool] = {"size": f"{count} x {nbytes // MIB} MiB"}
    for way in WAYS:
        moved_bytes = nbytes * count * (2 if way == "both" else 1)
        rates = {
            kind: moved_bytes / 1e9 / statistics.median(seconds[f"{kind}{way}"]) for kind in ("each ", "whole ", "")
        }
        plain = max(rates["each "], rates["whole "])
        row |= {f"plain_{way}": plain, way: rates[""], f"{way}_ratio": rates[""] / plain}
        row |= {f"plain_each_{way}": rates["each "], f"plain_whole_{way}": rates["whole "]}
    row["equal"] = storages.intact()
    return row


# The least ratios to plain, by the smallest storages that they hold for.
TARGETS = {
    1 * MIB: {"out": 0.80, "in": 0.80, "both": 0.85},
    4 * MIB: {"out": 0.80, "in": 0.80, "both": 0.90},
    16 * MIB: {"out": 0.95, "in": 0.95, "both": 0.90},
}


def check_row(result: Result, row: dict[str, float | str | bool], nbytes: int) -> None:
    """The targets: the rates, one way and both at once, and the bytes."""
    targets = TARGETS[max(least for least in TARGETS if least <= nbytes)]
    for way, target in targets.items():
        ratio = float(row[f"{way}_ratio"])
        result.check(f"{row['size']} {way} over plain", f"{target:.2f}", round(ratio, 3), ok=ratio >= target)
    result.check(f"{row['size']} bytes are right", "True", str(row["equal"]), ok=bool(row["equal"]))


def main() -> None:
    """Measures every size and writes the table after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scale", type=int, default=1, help="divides the number of storages")
    parser.add_argument("--output-dir", default="benchmarks/results")
    given = parser.parse_args()
    result = Result(name="transfers", title="Transfers against plain copies of the same bytes", columns=COLUMNS)
    sizes = [(nbytes, max(count // given.scale, 1)) for nbytes, count in SIZES]
    link = Link(max(nbytes * count for nbytes, count in sizes), torch.device(given.device))
    for nbytes, count in sizes:
        row = measure(nbytes, count, link, given.repeats)
        result.add(**row)
        check_row(result, row, nbytes)
        if given.device != "cpu":
            torch.cuda.empty_cache()
        result.write(given.output_dir)


if __name__ == "__main__":
    main()
