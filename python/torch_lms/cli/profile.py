"""``python -m torch_lms profile``: what each node of a model costs in time and memory."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from torch_lms.cli.given_model import add_model, check_folders, device_to_profile, given_model, given_optimizer
from torch_lms.cli.lines import print_line
from torch_lms.profile import ProfileConfig, profile
from torch_lms.profile.table import profile_table

__all__ = ["add_profile", "run_profile"]


def add_profile(parser: argparse.ArgumentParser) -> None:
    """Gives a parser the words of ``profile``."""
    add_model(parser, default="gpt")
    runs = parser.add_argument_group("runs")
    runs.add_argument(
        "--runs", type=int, default=ProfileConfig.timed_runs, help="that times are medians of (%(default)s)"
    )
    runs.add_argument("--warmup", type=int, default=ProfileConfig.warmup_runs, help="runs before these (%(default)s)")
    runs.add_argument("--no-links", action="store_true", help="do not measure copies between devices")
    results = parser.add_argument_group("results")
    results.add_argument("--json", type=Path, help="write the profile to this file, for the partition command")
    results.add_argument("--limit", type=int, metavar="NODES", help="show only so many, the slowest")


def run_profile(given: argparse.Namespace, console: Console) -> int:
    """Profiles, shows and writes.

    Raises:
        LmsError: for a model that cannot be found or does not run.
        ValueError: for words that make no sense, or a device that is not there.
    """
    check_folders(given.json)
    if given.limit is not None and given.limit < 1:
        raise ValueError(f"expected at least 1 node for --limit, found {given.limit}; leave it out for all")
    config = ProfileConfig(
        warmup_runs=given.warmup,
        timed_runs=given.runs,
        device=device_to_profile(given),
        pieces=given.pieces,
        links=not given.no_links,
    )
    optimizer = given_optimizer(given)
    model, args, kwargs = given_model(given)
    found = profile(model, *args, optimizer=optimizer, config=config, **kwargs)
    if given.json is not None:
        found.save(given.json)  # first: who reads the table may stop to
    console.print(profile_table(found, given.limit))
    if given.json is not None:
        print_line(console, f"wrote {given.json}")
    return 0
