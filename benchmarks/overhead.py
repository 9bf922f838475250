"""What paging costs where nothing moves: per op, per call of `pageout`, and per step of a model that fits."""

from __future__ import annotations

import argparse
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

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
# How paging begins and ends around the work that is timed.
Scope = tuple[Callable[[], None], Callable[[], None]]


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

    def compare(self, work: Callable[[], None], scope: Scope) -> tuple[float, float, float]:
        """Medians in seconds: plain, with paging, and of the differences between neighbours."""
        plain, paging = [], []
        begin, end = scope
        for _ in range(self.rounds):
            self.seconds(work)  # each time is taken after one run under the same conditions
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
    """A small op: plain, with one storage paged out (the callback is installed), and in automatic mode.

    Any callback that sees an op's inputs refers to them. For a tensor that nothing but a Python variable refers to,
    this is a first reference from C++, for which PyTorch takes Python's lock, twice. Tensors that a graph keeps for
    backward have one already. So both are measured.
    """
    other = torch.zeros(1 << 18, device=bench.device)

    def page_out() -> None:
        torch_lms.pageout(other)
        torch_lms.wait()

    def page_in() -> None:
        torch_lms.prefetch(other)
        torch_lms.wait()

    scopes: dict[str, Scope] = {
        "something paged out": (page_out, page_in),
        "automatic mode": (torch_lms.enable, torch_lms.disable),
    }
    for device in dict.fromkeys((bench.device, "cpu")):
        small, weight = torch.zeros(2, 16, device=device)
        graph = small * weight.requires_grad_()

        def work(small: torch.Tensor) -> None:
            with torch.no_grad():
                for _ in range(count):
                    small.neg_()  # one dispatch; others make several

        for held, tensor in (("held by a graph", small), ("held by Python alone", torch.zeros(16, device=device))):
            for name, scope in scopes.items():
                what = f"in-place op on 16 elements, {device}, {held}, {name}"
                times = bench.compare(partial(work, tensor), scope)
                plain, paging, added = (1e9 * seconds / count for seconds in times)
                result.add(what=what, plain=plain, paging=paging, unit="ns", added=added, ratio=paging / plain)
                result.check(f"{what}: added", "200 ns", round(added, 1), ok=added <= 200)
        del graph


def measure_calls(bench: Bench, result: Result, count: int) -> None:
    """What a page-out costs the thread that asks for it, for storages of 1 MiB."""
    tensors = [torch.zeros(1 << 18, device=bench.device) for _ in range(count)]
    torch_lms.swap.mlms.attach()
    torch.cuda.create_swap_env()  # type: ignore[attr-defined]
    calls: dict[str, Callable[[torch.Tensor], object]] = {
        "a call of torch_lms.pageout()": torch_lms.pageout,
        "a call of Tensor.pageout_manual()": torch.Tensor.pageout_manual,  # type: ignore[attr-defined]
    }
    try:
        for name, pageout in calls.items():
            times_us = [took for _ in range(bench.rounds) for took in _times_us(pageout, tensors)]
            median = statistics.median(times_us)
            result.add(what=name, paging=median, unit="us")
            result.check(name, "10 us", round(median, 2), ok=median <= 10)
    finally:
        torch.cuda.close_swap_env()  # type: ignore[attr-defined]


def _times_us(pageout: Callable[[torch.Tensor], object], tensors: list[torch.Tensor]) -> list[float]:
    """Each call's time; the tensors are resident before and after."""
    times_us = []
    for tensor in tensors:
        start = time.perf_counter()
        pageout(tensor)
        times_us.append(1e6 * (time.perf_counter() - start))
    torch_lms.wait()
    torch_lms.prefetch(tensors)
    torch_lms.wait()
    return times_us


def make_step(bench: Bench, shape: GPTShape, batch: int, steps: int) -> Callable[[], None]:
    """Some training steps of a GPT."""
    with torch.device(bench.device):
        model = GPT(shape).to(torch.bfloat16 if bench.device == "cuda" else torch.float32)
        ids = torch.randint(shape.vocabulary, (batch, shape.tokens))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def work() -> None:
        for _ in range(steps):
            model(ids, ids.roll(-1, 1)).backward()
            optimizer.step()
            optimizer.zero_grad()

    return work


def measure_idle_steps(bench: Bench, result: Result, model: str, work: Callable[[], None], steps: int) -> None:
    """A step without paging, and one after paging was used and is off again."""
    for _ in range(bench.rounds):
        work()  # clocks and the allocator settle
    before = [bench.seconds(work) for _ in range(2 * bench.rounds)]
    torch_lms.enable()
    work()
    torch_lms.disable()
    work()
    after = [bench.seconds(work) for _ in range(2 * bench.rounds)]
    plain, idle = (1e3 * statistics.median(seconds) / steps for seconds in (before, after))
    what = f"step of {model}, paging was used and is off"
    result.add(what=what, plain=plain, paging=idle, unit="ms", added=idle - plain, ratio=idle / plain)
    result.check(f"{what}: over plain", "1.005", round(idle / plain, 4), ok=idle / plain <= 1.005)


def measure_limited_steps(bench: Bench, result: Result, model: str, work: Callable[[], None], steps: int) -> None:
    """A step under a limit that is never reached."""
    torch_lms.stats(reset=True)
    plain, paging, added = (
        1e3 * seconds / steps for seconds in bench.compare(work, (torch_lms.enable, torch_lms.disable))
    )
    what = f"step of {model}, limit set, everything fits"
    result.add(what=what, plain=plain, paging=paging, unit="ms", added=added, ratio=1 + added / plain)
    result.check(f"{what}: over plain", "1.010", round(1 + added / plain, 4), ok=added / plain <= 0.01)
    moved = torch_lms.stats().pageouts
    result.check(f"{what}: page-outs", "0", str(moved), ok=moved == 0)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A GPT, and how many of its steps are timed together."""

    title: str
    shape: GPTShape
    batch: int
    steps: int


MODELS = {
    "large": Model(
        title="GPT 1.3B, 16 x 2048",
        shape=GPTShape(layers=24, hidden=2048, heads=16, tokens=2048, vocabulary=32000),
        batch=16,
        steps=1,
    ),
    # The device waits for the launches of its kernels: what an op costs more shows in the step.
    "small": Model(
        title="GPT 0.1B, 8 x 1024",
        shape=GPTShape(layers=12, hidden=768, heads=12, tokens=1024, vocabulary=50304),
        batch=8,
        steps=4,
    ),
}


def measure_steps(bench: Bench, result: Result, name: str) -> None:
    """A model's step, where paging is off and where it has nothing to do."""
    model = MODELS[name]
    work = make_step(bench, model.shape, model.batch, model.steps)
    measure_idle_steps(bench, result, model.title, work, model.steps)
    measure_limited_steps(bench, result, model.title, work, model.steps)


def main() -> None:
    """Measures each, writes the table after each; one that fails is a missed check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ops", type=int, default=10000)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--models", default="large,small", help="of those that are measured: large, small")
    parser.add_argument("--output-dir", default="benchmarks/results")
    given = parser.parse_args()
    result = Result(name="overhead", title="What paging costs where nothing moves", columns=COLUMNS)
    bench = Bench(given.device, given.rounds)
    stages: dict[str, Callable[[], None]] = {
        f"steps of {name}": partial(measure_steps, bench, result, name) for name in given.models.split(",")
    }
    stages |= {
        "ops": lambda: measure_ops(bench, result, given.ops),
        "calls": lambda: measure_calls(bench, result, given.calls),
    }
    for name, stage in stages.items():
        try:
            stage()
        except Exception as error:  # the other stages' figures are worth having
            traceback.print_exc()
            result.check(f"{name} ran", "True", f"{type(error).__name__}: {error}"[:300], ok=False)
            torch_lms.disable()
        result.write(given.output_dir)


if __name__ == "__main__":
    main()
