"""What is known of a node before it runs, and who is told when it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["PASSIVE_OPS", "NodeFacts", "Watcher"]

PASSIVE_OPS = ("placeholder", "get_attr", "output")  # they compute nothing


class Watcher(Protocol):
    """Is told of each node."""

    def watch(self, name: str, run: Callable[[], Any]) -> Any:
        """Runs the node; what it returns is the node's value."""


@dataclass(frozen=True)
class NodeFacts:
    """What is known of a node before it runs; fields as of `torch_lms.profile.document.NodeProfile`."""

    name: str
    op: str
    target: str
    inputs: tuple[str, ...] = ()
    module: str = ""
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    not_before: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
