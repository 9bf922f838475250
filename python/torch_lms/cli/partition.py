"""``python -m torch_lms partition``: where to cut a profiled model, and what each algorithm makes of it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from torch_lms.cli.given_model import check_folders, check_picture
from torch_lms.cli.lines import print_line
from torch_lms.errors import ProfileError
from torch_lms.memory_sizes import parse_bytes
from torch_lms.partition import (
    KEEP_ALL,
    CostGraph,
    CostModel,
    DeviceSpec,
    LinkSpec,
    MemoryRelief,
    Partition,
    PartitionProblem,
    RecomputeAndSwap,
    find_algorithm,
    links_from_profile,
    optimizer_multiplier,
    partition,
)
from torch_lms.partition.compare import compare
from torch_lms.profile.document import Profile
from torch_lms.schedules.rules import SCHEDULES

__all__ = ["add_partition", "run_partition"]

_BYTES_PER_US_OF_GB_PER_S = 1000.0


def add_partition(parser: argparse.ArgumentParser) -> None:
    """Gives a parser the words of ``partition``."""
    parser.add_argument("profile", type=Path, help="a profile's JSON file, as the profile command writes it")
    parser.add_argument("--devices", help="names, comma separated; one for each stage")
    parser.add_argument("--stages", type=int, help="how many, where devices are not named")
    parser.add_argument("--algorithm", default="auto", help="a name, or type:<regular expression> (%(default)s)")
    parser.add_argument("--compare", action="store_true", help="show every algorithm")
    devices = parser.add_argument_group("devices", "One value for all, or one for each, comma separated.")
    devices.add_argument("--cap", help="memory of a device, such as 24GiB")
    devices.add_argument("--relieve", action="store_true", help="stages without room compute segments again")
    devices.add_argument(
        "--host-gb-per-s", type=float, help="with --relieve: swap where that is not enough, over this link"
    )
    devices.add_argument("--speed", default="1", help="times the profiled device's (%(default)s)")
    devices.add_argument("--reorder", action="store_true", help="the devices may change places")
    devices.add_argument("--link-gb-per-s", type=float, help="between devices; by default what the profile measured")
    devices.add_argument("--link-latency-us", type=float, default=0.0, help="(%(default)s)")
    _add_prices(parser.add_argument_group("training"))
    results = parser.add_argument_group("results")
    results.add_argument("--output", type=Path, help="draw all algorithms: a .png, .svg or .pdf file")
    results.add_argument("--json", type=Path, help="write the stage of every node, and all figures, to this file")


def run_partition(given: argparse.Namespace, console: Console) -> int:
    """Cuts, shows and writes.

    Raises:
        LmsError: for a file that is no profile, words that make no sense, or caps that nothing meets.
    """
    check_folders(given.output, given.json)
    check_picture(given.output)
    problem = _problem(given)
    find_algorithm(given.algorithm)  # a wrong name is told before anything runs
    comparison = compare(problem) if given.compare or given.output else None
    if comparison is not None and given.compare:
        console.print(comparison.table())
    if comparison is not None and given.output:
        comparison.draw(given.output)
    made = partition(problem, given.algorithm)
    if given.json:
        document = _document(made, comparison.to_json() if comparison else None)
        given.json.write_text(json.dumps(document, indent=1) + "\n")
    print_line(console, f"{made.algorithm}: {made.reason}")
    for stage, line in enumerate(_lines(problem, made)):
        print_line(console, f"stage {stage}: {line}")
    return 0


def _add_prices(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="(%(default)s)")
    group.add_argument("--microbatches", type=int, default=8, help="in a step (%(default)s)")
    group.add_argument("--optimizer", default="adam", help="if its state was not measured (%(default)s)")
    group.add_argument("--memory-buffer", type=float, default=0.1, help="share that stays free (%(default)s)")
    group.add_argument("--no-overlap", action="store_true", help="stages wait for transfers")


def _problem(given: argparse.Namespace) -> PartitionProblem:
    profile = _read(given.profile)
    if (given.stages or 0) > len(profile.nodes):
        raise ValueError(
            f"expected at most as many stages as the profile has nodes, found {given.stages} for "
            f"{len(profile.nodes)}; use fewer stages"
        )
    names = given.devices.split(",") if given.devices else [f"stage{index}" for index in range(given.stages or 0)]
    if given.stages is None and not given.devices:
        raise ValueError("expected --devices or --stages, found neither; say into how many stages to cut")
    if given.devices and given.stages not in (None, len(names)):
        raise ValueError(
            f"expected as many --devices as --stages, found {len(names)} and {given.stages}; leave --stages out"
        )
    if not names or not all(names):
        raise ValueError(
            f"expected at least one stage, and a name for each device, found --stages {given.stages} and --devices "
            f"{given.devices!r}; correct them"
        )
    caps = _each(given.cap, names, "--cap") if given.cap else [None] * len(names)
    speeds = [_speed(value) for value in _each(given.speed, names, "--speed")]
    devices = tuple(
        DeviceSpec(name=name, memory_cap_bytes=None if cap is None else parse_bytes(cap), speed=speed)
        for name, cap, speed in zip(names, caps, speeds, strict=True)
    )
    rate = given.link_gb_per_s
    slow = LinkSpec(
        bytes_per_us=(1.0 if rate is None else rate) * _BYTES_PER_US_OF_GB_PER_S, latency_us=given.link_latency_us
    )
    return PartitionProblem(
        graph=CostGraph.from_profile(profile),
        devices=devices,
        links=slow if rate is not None else links_from_profile(profile, devices),
        cost_model=CostModel(
            schedule=given.schedule,
            microbatches=given.microbatches,
            optimizer_multiplier=optimizer_multiplier(given.optimizer),
            memory_buffer=given.memory_buffer,
            overlap_communication=not given.no_overlap,
            relief=_relief(given),
        ),
        reorder_devices=given.reorder,
    )


def _relief(given: argparse.Namespace) -> MemoryRelief:
    if not given.relieve:
        return KEEP_ALL
    rate = given.host_gb_per_s
    link = None if rate is None else LinkSpec(bytes_per_us=rate * _BYTES_PER_US_OF_GB_PER_S)
    return RecomputeAndSwap(host_link=link, swap_last=True)


def _read(path: Path) -> Profile:
    try:
        return Profile.load(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(
            f"expected a profile in {path}, found {error}; write one with the profile command"
        ) from error


def _each(given: str, names: list[str], word: str) -> list[str]:
    values = given.split(",")
    if len(values) not in (1, len(names)):
        raise ValueError(f"expected 1 or {len(names)} values for {word}, found {len(values)}; one for each stage")
    return values * (len(names) // len(values))


def _speed(given: str) -> float:
    try:
        return float(given)
    except ValueError as error:
        raise ValueError(f"expected numbers for --speed, found {given!r}; 1 is the profiled device's") from error


def _lines(problem: PartitionProblem, made: Partition) -> list[str]:
    """For each stage its device, its nodes from first to last, its time and its memory."""
    lines = []
    for stage in range(made.stages):
        given_up = made.stage_relief[stage] if made.stage_relief else None
        mine = [node.name for node in problem.units.nodes if made.stage_of[node.name] == stage]
        lines.append(
            f"{made.devices[stage]}, {len(mine)} nodes from {mine[0]} to {mine[-1]}, "
            f"{made.stage_time_us[stage] / 1e3:.3f} ms a microbatch, {made.stage_memory_bytes[stage] / 2**20:.1f} MiB"
            + (f", {given_up}" if given_up else "")
        )
    return lines


def _document(made: Partition, others: list[dict[str, Any]] | None) -> dict[str, Any]:
    return {
        "algorithm": made.algorithm,
        "reason": made.reason,
        "devices": list(made.devices),
        "speeds": list(made.speeds),
        "stage_of": dict(made.stage_of),
        "stage_time_us": list(made.stage_time_us),
        "stage_memory_bytes": list(made.stage_memory_bytes),
        "stage_relief": [asdict(one) for one in made.stage_relief],
        "cut_bytes": list(made.cut_bytes),
        "step_us": made.step_us,
        "bubble": made.bubble,
        "lower_bound_us": made.lower_bound_us,
        "algorithms": others,
    }
