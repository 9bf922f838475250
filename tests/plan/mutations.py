"""Documents with one thing wrong."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from hypothesis import strategies as st

_WRONG: list[Any] = ["text", -1, 1.5, True, None, [], {}, [None], {"a": 1}, 10**400, "forward"]


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    if isinstance(value, dict):
        for name in value:
            found += _paths(value[name], (*path, name))
    elif isinstance(value, list):
        for at in range(min(len(value), 2)):
            found += _paths(value[at], (*path, at))
    return found


@st.composite
def mutated(draw: st.DrawFn, document: dict[str, Any]) -> dict[str, Any]:
    """A copy with a value replaced, taken away, or put in."""
    changed = deepcopy(document)
    path = draw(st.sampled_from(_paths(changed)))
    parent = changed
    for step in path[:-1]:
        parent = parent[step]
    how = draw(st.sampled_from(["replace", "remove", "add"]))
    if how == "replace":
        parent[path[-1]] = draw(st.sampled_from(_WRONG))
    elif how == "remove":
        del parent[path[-1]]
    elif isinstance(parent, dict):
        parent["unknown"] = 1
    else:
        parent.insert(path[-1], draw(st.sampled_from(_WRONG)))
    return changed
