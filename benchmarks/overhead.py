"""What paging costs where nothing moves: per step of a model that fits, per op, per call of `pageout`."""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import traceback
from collections.abc import Callable
from functools import partial

import torch

import torch_lms
from benchmarks.overhead_models import MODELS, Model
from benchmarks.results import Result
from benchmarks.small_ops import measure_ops
from benchmarks.training import GIB
from benchmarks.turns import Scope, Turns
from torch_lms._core import core

COLUMNS = [
    ("what", "What", "{}"),
    ("plain", "Plain", "{:.2f}"),
    ("paging", "With paging", "{:.2f}"),
    ("unit", "Unit", "{}"),
    ("added", "Added", "{:.2f}"),
    ("ratio", "Ratio", "{:.4f}"),
    ("noise", "Plain / plain - 1", "{:.4f}"),
]
FAR = "95%"  # of the device's memory
CALLS_MOST_US = 8.0


def measure_calls(device: str, result: Result, count: int, rounds: int = 7) -> None:
    """What a page-out costs the thread that asks for it, for storages of 1 MiB."""
    tensors = [torch.zeros(1 << 18, device=device) for _ in range(count)]
    torch_lms.swap.mlms.attach()
    torch.cuda.create_swap_env()  # type: ignore[attr-defined]
    calls: dict[str, Callable[[torch.Tensor], object]] = {
        "a call of torch_lms.pageout()": torch_lms.pageout,
        "a call of Tensor.pageout_manual()": torch.Tensor.pageout_manual,  # type: ignore[attr-defined]
    }
    times_us: dict[str, list[float]] = {name: [] for name in calls}
    try:
        for _ in range(rounds):  # by turns, as a machine is not the same all the time
            for name, pageout in calls.items():
                times_us[name] += _times_us(pageout, tensors)
        for name, took_us in times_us.items():
            median = statistics.median(took_us)
            result.add(what=name, paging=median, unit="us")
            result.check(name, f"{CALLS_MOST_US} us", round(median, 2), ok=median <= CALLS_MOST_US)
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


def measure_steps(device: str, budget_s: float, result: Result, model: Model) -> None:
    """A model's step under a limit that is never reached, and without one before and after that."""
    work = model.work(device)
    turns = Turns(device, budget_s=budget_s)
    for _ in range(3):
        work()  # clocks and the allocator settle
    before = statistics.median(turns.seconds(work) for _ in range(6))
    peak_gib = torch.cuda.max_memory_allocated() / GIB if device == "cuda" else None
    torch_lms.stats(reset=True)
    observed: list[bool] = []

    def end() -> None:
        observed.append(core.observing_ops())
        torch_lms.disable()

    # Three steps at least, of which the first tells automatic mode what a step is.
    warm_up = 1 + 2 // model.steps
    found = turns.compare(work, Scope(begin=lambda: torch_lms.enable({device: FAR}), end=end, warm_up=warm_up))
    ms = 1e3 / model.steps
    what = f"step of {model.title}, limit set, everything fits"
    result.add(
        **{"what": what, "unit": "ms", "ratio": found.ratio, "noise": found.noise, "added": ms * found.added},
        **{"plain": ms * found.plain, "paging": ms * found.paging, "rounds": found.rounds},
        **{"peak_gib": peak_gib, "observing": observed},
    )
    ratio = round(found.ratio, 4)
    result.check(f"{what}: over plain", f"{model.most:.3f}", ratio, ok=found.ratio <= model.most)
    moved = torch_lms.stats().pageouts
    result.check(f"{what}: page-outs", "0", str(moved), ok=moved == 0)
    what = f"step of {model.title}, paging was used and is off"
    ratio = found.plain / before
    result.add(what=what, plain=ms * before, paging=ms * found.plain, unit="ms", ratio=ratio)
    result.check(f"{what}: over before", "1.005", round(ratio, 4), ok=ratio <= 1.005)


def arguments() -> argparse.Namespace:
    """What the flags say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ops", type=int, default=3000, help="that are timed together")
    parser.add_argument("--ops-s", type=float, default=0.8, help="seconds for each kind of op")
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--models", default="large,small,resnet", help=f"of {', '.join(MODELS)}; or none")
    parser.add_argument("--large-s", type=float, default=32, help="seconds for the steps of the large model")
    parser.add_argument("--model-s", type=float, default=12, help="seconds for the steps of each other model")
    parser.add_argument("--output-dir", default="benchmarks/results")
    return parser.parse_args()


def main() -> None:
    """Measures each, writes the table after each; one that fails is a missed check."""
    given = arguments()
    result = Result(name="overhead", title="What paging costs where nothing moves", columns=COLUMNS)
    if given.device == "cpu":
        torch_lms.swap.count_cpu_allocations()
    stages: dict[str, Callable[[], None]] = {
        f"steps of {name}": partial(
            measure_steps, given.device, given.large_s if name == "large" else given.model_s, result, MODELS[name]
        )
        for name in given.models.split(",")
        if name != "none"
    }
    for device in dict.fromkeys((given.device, "cpu")):
        stages[f"ops on {device}"] = partial(measure_ops, device, result, given.ops, given.ops_s)
    stages["calls"] = partial(measure_calls, given.device, result, given.calls)
    for name, stage in stages.items():
        try:
            stage()
        except Exception as error:  # the other stages' figures are worth having
            traceback.print_exc()
            result.check(f"{name} ran", "True", f"{type(error).__name__}: {error}"[:300], ok=False)
            torch_lms.disable()
        gc.collect()
        if given.device == "cuda":
            torch.cuda.empty_cache()
        result.write(given.output_dir)


if __name__ == "__main__":
    main()
