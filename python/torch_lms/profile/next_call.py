"""Whether a forward does the same in its next call, after what the first one has noted in the model's attributes.

A graph has one side of ``if self.calls == 1``, and the value of ``self.calls`` as a constant. So a model whose forward
changes plain attributes is traced a second time, with these as they are after the first. What comes only later, such as
with the hundredth call, is not found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from torch_lms.errors import ProfileError
from torch_lms.profile.attributes import Change
from torch_lms.profile.regions import Region
from torch_lms.profile.sameness import is_same, without_addresses

__all__ = ["describe", "refuse_other_call"]


def describe(graph: fx.Graph, read: Callable[[str], Any]) -> list[Any]:
    """What the nodes of a graph do, and the attributes that they read.

    Args:
        graph: whose nodes are described.
        read: gives what has a name in the model.
    """
    found: list[Any] = []
    for node in graph.nodes:
        value = read(str(node.target)) if node.op in ("get_attr", "call_module") else None
        value = value.generated.source if isinstance(value, Region) else value
        texts = [without_addresses(part) for part in (node.target, node.args, node.kwargs)]
        found.append((node.op, texts, value))
    return found


def refuse_other_call(first: list[Any], second: list[Any], changes: Sequence[Change]) -> None:
    """Says that a graph would have the first call for all of them.

    Args:
        first: what `describe` told of that call.
        second: of the next.
        changes: that the first call has made.

    Raises:
        ProfileError: if they differ.
    """
    if not is_same(first, second):
        names = sorted({f"{one.module}.{one.name}".lstrip(".") for one in changes})
        raise ProfileError(
            f"expected a forward that does the same in each call, found one that changes {', '.join(names)} and does "
            "something else in its next call; keep what changes in buffers and choose by torch.where"
        )
