"""``python -m torch_lms plan``: a plan of a recorded cycle, or of a model that has not trained yet."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from torch_lms.cli.given_model import add_model, check_folders, device_to_profile, given_model, given_optimizer
from torch_lms.cli.lines import print_line
from torch_lms.fitting import DeviceRates, FitConfig, trace_step
from torch_lms.memory_sizes import in_gib, parse_bytes
from torch_lms.plan import Link, Plan, Trace, least_limit, make_plan
from torch_lms.profile import ProfileConfig

__all__ = ["add_plan", "add_wishes", "plan_under", "run_plan"]

_FLOPS_PER_US_OF_TFLOPS = 1e6
_BYTES_PER_US_OF_GB_PER_S = 1e3
_RATES = ("tflops", "memory_gb_per_s", "link_gb_per_s")


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Gives a parser the words of ``plan``."""
    parser.add_argument("trace", type=Path, nargs="?", help="a trace's JSON file; without one, name a --model")
    parser.add_argument("--limit", required=True, help="of the device's memory, such as 20GiB")
    add_wishes(parser)
    add_model(parser, default=None)
    parser.add_argument("--runs", type=int, default=5, help="of the model, that times are medians of (%(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="runs before these (%(default)s)")
    parser.add_argument("--min-bytes", default="1MiB", help="smaller storages of the model stay (%(default)s)")
    rates = parser.add_argument_group("rates", "Of a device that is not there: then nothing is run.")
    rates.add_argument("--tflops", type=float, help="operations of products of matrices, in practice")
    rates.add_argument("--memory-gb-per-s", type=float, help="that its memory reads and writes")
    rates.add_argument("--link-gb-per-s", type=float, help="between it and the host, in each direction")
    results = parser.add_argument_group("results")
    results.add_argument("--output", type=Path, help="write the plan, as JSON, to this file")
    results.add_argument("--save-trace", type=Path, help="write the model's trace, as JSON, to this file")


def run_plan(given: argparse.Namespace, console: Console) -> int:
    """Plans a trace or a model's step, shows the plan and writes it.

    Raises:
        LmsError: for a file that is no trace, a model that does not run, a limit that makes no sense, or one that
            nothing meets.
        ValueError: for words that make no sense.
    """
    if (given.trace is None) == (given.model is None):
        raise ValueError("expected a trace's file or --model, found both or neither; give one of them")
    check_folders(given.output, given.save_trace)
    limit_bytes = parse_bytes(given.limit)
    trace = Trace.load(given.trace) if given.trace is not None else _traced(given)
    if given.save_trace is not None:
        trace.save(given.save_trace)
        print_line(console, f"wrote {given.save_trace}")
    plan = plan_under(trace, limit_bytes, given)
    if given.output:
        plan.save(given.output)  # first: who reads the plan may stop to
    print_line(console, str(plan))
    print_line(console, _verdict(trace, plan, given))
    if given.output:
        print_line(console, f"wrote {given.output}")
    return 0


def add_wishes(parser: argparse.ArgumentParser) -> None:
    """Gives a parser the words for what a plan may do."""
    parser.add_argument("--host-limit", help="of the host's memory for swapped storages")
    parser.add_argument("--no-swap", action="store_true", help="let no storage leave by a copy")
    parser.add_argument("--no-recompute", action="store_true", help="drop no storage")


def plan_under(trace: Trace, limit_bytes: int, given: argparse.Namespace) -> Plan:
    """The plan for a limit and for what the words of `add_wishes` say.

    Raises:
        LimitError: for a limit that nothing meets.
    """
    host_limit_bytes = _host_limit_bytes(given)
    return make_plan(
        trace,
        limit_bytes,
        host_limit_bytes=host_limit_bytes,
        swap=not given.no_swap,
        recompute=not given.no_recompute,
    )


def _traced(given: argparse.Namespace) -> Trace:
    """A training step of the model."""
    config = FitConfig(
        profile=ProfileConfig(
            warmup_runs=given.warmup,
            timed_runs=given.runs,
            device=device_to_profile(given),
            pieces=given.pieces,
            links=False,
        ),
        rates=_rates(given),
        min_bytes=given.min_bytes,
    )
    optimizer = given_optimizer(given)
    model, args, kwargs = given_model(given)
    return trace_step(model, *args, optimizer=optimizer, config=config, **kwargs)


def _rates(given: argparse.Namespace) -> DeviceRates | None:
    values = [getattr(given, name) for name in _RATES]
    missing = [f"--{name.replace('_', '-')}" for name, value in zip(_RATES, values, strict=True) if value is None]
    if len(missing) == len(_RATES):
        return None
    if missing:
        raise ValueError(f"expected all rates of a device or none, found no {' and no '.join(missing)}; add what lacks")
    tflops, memory_gb_per_s, link_gb_per_s = values
    link_bytes_per_us = link_gb_per_s * _BYTES_PER_US_OF_GB_PER_S
    return DeviceRates(
        flops_per_us=tflops * _FLOPS_PER_US_OF_TFLOPS,
        memory_bytes_per_us=memory_gb_per_s * _BYTES_PER_US_OF_GB_PER_S,
        link=Link(out_bytes_per_us=link_bytes_per_us, in_bytes_per_us=link_bytes_per_us, latency_us=10.0),
    )


def _verdict(trace: Trace, plan: Plan, given: argparse.Namespace) -> str:
    """That it fits, in how much time, and what the least limit is."""
    least_bytes = least_limit(
        trace, host_limit_bytes=_host_limit_bytes(given), swap=not given.no_swap, recompute=not given.no_recompute
    )
    known = plan.predicted
    slower = known.step_us / known.plain_us if known.plain_us else 1.0
    return (
        f"fits: a step takes {known.step_us / 1e3:.1f} ms, {slower:.2f} times the plain one; the least limit is "
        f"{least_bytes} bytes ({in_gib(least_bytes)})"
    )


def _host_limit_bytes(given: argparse.Namespace) -> int | None:
    return None if given.host_limit is None else parse_bytes(given.host_limit)
