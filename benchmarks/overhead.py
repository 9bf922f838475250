"""What paging costs where nothing moves: per op, per call of `pageout`, and per step of a model that fits."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import torch_lms
from benchmarks.results import Result
from torch_lms.cli.models import GPT, GPTShape

COLUMNS = [
    ("what", "What", "{}"),
    ("plain", "Plain", "{:.2f}"),
    ("paging", "With paging", "{:.2f}"),
    ("unit", "Unit", "{}"),
    ("added", "Added", "{:.2f}"),
    ("ratio", "Ratio", "{:.3f}"),
]


class Bench:
    """Times the same work with and without paging in turns, so that drift hits both alike."""

    def __init__(self, device: str, rounds: int) -> None:
        self.device = device
        self.rounds = rounds

    def seconds(self, work: Callable[[], None]) -> float:
        """One run of the work, which is waited for."""
        self._synchronize()
        start = time.perf_counter()
        work()
        self._synchronize()
        return time.perf_counter() - start

    def compare(
        self, work: Callable[[], None], begin: Callable[[], None], end: Callable[[], None]
    ) -> tuple[float, float, float]:
        """Medians in seconds: plain, with paging, and of the differences between neighbours."""
        plain, paging = [], []
        for _ in range(self.rounds):
            plain.append(self.seconds(work))
            begin()
            self.seconds(work)
            paging.append(self.seconds(work))
            end()
        added = [with_paging - without for with_paging, without in zip(paging, plain, strict=True)]
        return statistics.median(plain), statistics.median(paging), statistics.median(added)

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def measure_ops(bench: Bench, result: Result, count: int) -> None:
    """A small op: plain, with one storage paged out (the callback is installed), and in automatic mode."""
    small = torch.zeros(16, device=bench.device)
    other = torch.zeros(1 << 18, device=bench.device)

    def work() -> None:
        with torch.no_grad():
            for _ in range(count):
                small.add_(1)

    def page_out() -> None:
        torch_lms.pageout(other)
        torch_lms.wait()

    def page_in() -> None:
        torch_lms.prefetch(other)
        torch_lms.wait()

    work()
    for name, begin, end in (
        ("in-place op on 16 elements, something paged out", page_out, page_in),
        ("in-place op on 16 elements, automatic mode", torch_lms.enable, torch_lms.disable),
    ):
        plain, paging, added = (1e9 * seconds / count for seconds in bench.compare(work, begin, end))
        result.add(what=name, plain=plain, paging=paging, unit="ns", added=added, ratio=paging / plain)
        result.check(f"{name}: added", "200 ns", round(added, 1), ok=added <= 200)


def measure_calls(bench: Bench, result: Result, count: int) -> None:
    """What `pageout` costs the thread that calls it, for storages of 1 MiB."""
    tensors = [torch.zeros(1 << 18, device=bench.device) for _ in range(count)]
    times_us = []
    for _ in range(bench.rounds):
        for tensor in tensors:
            start = time.perf_counter()
            torch_lms.pageout(tensor)
            times_us.append(1e6 * (time.perf_counter() - start))
        torch_lms.wait()
        torch_lms.prefetch(tensors)
        torch_lms.wait()
    median = statistics.median(times_us)
    result.add(what="a call of pageout()", paging=median, unit="us")
    result.check("a call of pageout()", "10 us", round(median, 2), ok=median <= 10)


def measure_steps(bench: Bench, result: Result, shape: GPTShape, batch: int) -> None:
    """A step of a model that fits: after paging has been used and is idle, and under a limit that is never reached."""
    dtype = torch.bfloat16 if bench.device == "cuda" else torch.float32
    with torch.device(bench.device):
        model = GPT(shape).to(dtype)
        ids = torch.randint(shape.vocabulary, (batch, shape.tokens))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def work() -> None:
        for _ in range(3):
            model(ids, ids.roll(-1, 1)).backward()
            optimizer.step()
            optimizer.zero_grad()

    def nothing() -> None:
        return

    def use_and_stop() -> None:
        torch_lms.enable()
        torch_lms.disable()

    work()
    for name, begin, end, target in (
        ("step, nothing paged out, no limit", use_and_stop, nothing, 1.005),
        ("step, limit set, everything fits", torch_lms.enable, torch_lms.disable, 1.01),
    ):
        plain, paging, added = (1e3 * seconds / 3 for seconds in bench.compare(work, begin, end))
        ratio = 1 + added / plain
        result.add(what=name, plain=plain, paging=paging, unit="ms", added=added, ratio=ratio)
        result.check(f"{name}: over plain", f"{target:.3f}", round(ratio, 4), ok=ratio <= target)


def main() -> None:
    """Measures all three and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ops", type=int, default=20000)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--output-dir", default="benchmarks/results")
    given = parser.parse_args()
    result = Result(name="overhead", title="What paging costs where nothing moves", columns=COLUMNS)
    bench = Bench(given.device, given.rounds)
    shape = GPTShape(
        layers=given.layers, hidden=given.hidden, heads=given.hidden // 64, tokens=given.tokens, vocabulary=32000
    )
    measure_steps(bench, result, shape, given.batch)
    measure_ops(bench, result, given.ops)
    measure_calls(bench, result, given.calls)
    result.write(given.output_dir)


if __name__ == "__main__":
    main()
