"""Lines that are shown as they are."""

from __future__ import annotations

from rich.console import Console

__all__ = ["print_line"]


def print_line(console: Console, text: str) -> None:
    """Prints a text of the program's or of the user's: nothing in it is markup, nothing is broken to fit a width."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
