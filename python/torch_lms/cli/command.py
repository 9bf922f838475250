"""From words to the command that they name, and from its errors to an exit status."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console

from torch_lms.cli.arguments import make_parser, train_options
from torch_lms.cli.doctor import doctor
from torch_lms.cli.explain import run_explain
from torch_lms.cli.lines import print_line
from torch_lms.cli.partition import run_partition
from torch_lms.cli.pipeline import run_pipeline
from torch_lms.cli.plan import run_plan
from torch_lms.cli.profile import run_profile
from torch_lms.cli.train import train
from torch_lms.errors import LmsError

__all__ = ["run"]

_UNREAD = 141  # as shells have it for SIGPIPE
_COMMANDS = {"explain": run_explain, "partition": run_partition, "plan": run_plan, "profile": run_profile}


def run(arguments: Sequence[str] | None) -> int:
    """Runs a command and returns the exit status."""
    try:
        return _run_command(arguments)
    except BrokenPipeError:
        return _UNREAD
    except OSError as error:
        return _tell(f"expected files that can be read and written, found {error}; name others")


def _run_command(arguments: Sequence[str] | None) -> int:
    parser = make_parser()
    given = parser.parse_args(arguments)
    console = Console()
    if given.command == "doctor":
        return doctor(console, as_json=given.json)
    if given.command == "pipeline":
        return run_pipeline(given)
    if given.command in _COMMANDS:
        return _run(given, parser, console)
    try:
        options = train_options(given)
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    try:
        return train(options, console)
    except LmsError as error:
        return _tell(error)


def _run(given: argparse.Namespace, parser: argparse.ArgumentParser, console: Console) -> int:
    try:
        return _COMMANDS[given.command](given, console)
    except LmsError as error:
        return _tell(error)
    except ValueError as error:
        parser.error(str(error))


def _tell(error: LmsError | str) -> int:
    print_line(Console(stderr=True), f"torch_lms: {error}")
    return 1
