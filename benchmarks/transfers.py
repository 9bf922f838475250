"""Page-outs and page-ins against plain copies of the same bytes, in the same process, size by size."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import torch_lms
from benchmarks.results import Result

MIB = 1 << 20
# Of each storage, and how many of them move at once.
SIZES = [(1 * MIB, 512), (4 * MIB, 256), (16 * MIB, 128), (64 * MIB, 32), (256 * MIB, 8), (1024 * MIB, 3)]
COLUMNS = [
    ("size", "Storages", "{}"),
    ("plain_out", "Plain copy out (GB/s)", "{:.1f}"),
    ("out", "Page-out (GB/s)", "{:.1f}"),
    ("out_ratio", "/ plain", "{:.2f}"),
    ("plain_in", "Plain copy in (GB/s)", "{:.1f}"),
    ("in", "Page-in (GB/s)", "{:.1f}"),
    ("in_ratio", "/ plain", "{:.2f}"),
    ("plain_both", "Plain both ways (GB/s)", "{:.1f}"),
    ("both", "Both ways (GB/s)", "{:.1f}"),
    ("both_ratio", "/ plain", "{:.2f}"),
]


class Transfers:
    """Two sets of storages of one size, and pinned memory for plain copies of them."""

    def __init__(self, nbytes: int, count: int, device: torch.device) -> None:
        self.device = device
        self.nbytes = nbytes * count
        cuda = device.type == "cuda"
        self.sets = [
            [torch.full((nbytes,), index % 100, dtype=torch.uint8, device=device) for index in range(count)]
            for _ in range(2)
        ]
        self.hosts = [[torch.empty(nbytes, dtype=torch.uint8, pin_memory=cuda) for _ in range(count)] for _ in range(2)]
        self.streams = [torch.cuda.Stream(device) for _ in range(2)] if cuda else []

    def rate(self, action: Callable[[], None], nbytes: int) -> float:
        """Bytes a second of an action, which is waited for."""
        self._synchronize()
        start = time.perf_counter()
        action()
        self._synchronize()
        return nbytes / (time.perf_counter() - start)

    def plain(self, direction: str) -> float:
        """Copies as fast as the link allows, without us."""
        return self.rate(lambda: self._copy(direction), self.nbytes * (2 if direction == "both" else 1))

    def paged(self, repeats: int) -> dict[str, list[float]]:
        """Each direction alone, then both at once; the storages are resident before and after."""
        rates: dict[str, list[float]] = {"out": [], "in": [], "both": []}
        one, other = self.sets
        for _ in range(repeats):
            rates["out"].append(self.rate(lambda: self._page(out=one), self.nbytes))
            rates["both"].append(self.rate(lambda: self._page(out=other, back=one), 2 * self.nbytes))
            rates["in"].append(self.rate(lambda: self._page(back=other), self.nbytes))
        return rates

    def check(self) -> bool:
        """Whether every byte is what it was."""
        return all(bool((tensor == index % 100).all()) for tensors in self.sets for index, tensor in enumerate(tensors))

    def _page(self, *, out: list[torch.Tensor] | None = None, back: list[torch.Tensor] | None = None) -> None:
        torch_lms.pageout(out or [])
        torch_lms.prefetch(back or [])
        torch_lms.wait()

    def _copy(self, direction: str) -> None:
        for way in ("out", "in") if direction == "both" else (direction,):
            index = 0 if way == "out" else 1
            with torch.cuda.stream(self.streams[index] if self.streams else None):
                for tensor, host in zip(self.sets[index], self.hosts[index], strict=True):
                    if way == "out":
                        host.copy_(tensor, non_blocking=True)
                    else:
                        tensor.copy_(host, non_blocking=True)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measure(nbytes: int, count: int, device: torch.device, repeats: int) -> dict[str, float | str | bool]:
    """One row: medians, plain and paged in turns."""
    transfers = Transfers(nbytes, count, device)
    transfers._copy("out")  # so that page-ins of plain copies bring the right bytes
    for tensors, hosts in zip(transfers.sets, transfers.hosts, strict=True):
        for tensor, host in zip(tensors, hosts, strict=True):
            host.copy_(tensor)
    transfers.paged(1)  # grows the host pool
    row: dict[str, float | str | bool] = {"size": f"{count} x {nbytes // MIB} MiB"}
    rates = transfers.paged(repeats)
    for way in ("out", "in", "both"):
        plain = statistics.median(transfers.plain(way) for _ in range(repeats)) / 1e9
        paged = statistics.median(rates[way]) / 1e9
        row |= {f"plain_{way}": plain, way: paged, f"{way}_ratio": paged / plain}
    row["equal"] = transfers.check()
    return row


def check_row(result: Result, row: dict[str, float | str | bool], nbytes: int) -> None:
    """The targets."""
    one_way = 0.95 if nbytes >= 16 * MIB else 0.80
    for way, target in (("out", one_way), ("in", one_way), ("both", 0.90 if nbytes >= 16 * MIB else 0.0)):
        ratio = float(row[f"{way}_ratio"])
        result.check(f"{row['size']} {way} over plain", f"{target:.2f}", round(ratio, 3), ok=ratio >= target)
    result.check(f"{row['size']} bytes are right", "True", str(row["equal"]), ok=bool(row["equal"]))


def main() -> None:
    """Measures every size and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scale", type=int, default=1, help="divides the number of storages")
    parser.add_argument("--output-dir", default="benchmarks/results")
    given = parser.parse_args()
    result = Result(name="transfers", title="Transfers against plain copies of the same bytes", columns=COLUMNS)
    for nbytes, count in SIZES:
        row = measure(nbytes, max(count // given.scale, 1), torch.device(given.device), given.repeats)
        result.add(**row)
        check_row(result, row, nbytes)
        if given.device != "cpu":
            torch.cuda.empty_cache()
    result.write(given.output_dir)


if __name__ == "__main__":
    main()
