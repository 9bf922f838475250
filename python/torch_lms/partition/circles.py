"""Circles of a directed graph, and an order of them without any: what has to stay together, and what comes first."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

__all__ = ["circles", "in_order"]

Edges = Mapping[str, Sequence[str]]


def circles(before: Edges) -> list[list[str]]:
    """The strongly connected parts of a graph, each in the graph's own order.

    Source: Tarjan, Depth-first search and linear graph algorithms, SIAM J. Comput. 1 (1972), without recursion.

    Args:
        before: of each node those with an edge to it.
    """
    place = {name: index for index, name in enumerate(before)}
    seen: dict[str, int] = {}
    lowest: dict[str, int] = {}
    open_: dict[str, None] = {}
    found: list[list[str]] = []
    for root in before:
        way = [] if root in seen else [(root, iter(before[root]))]
        if way:
            seen[root] = lowest[root] = len(seen)
            open_[root] = None
        while way:
            name, left = way[-1]
            source = next(left, None)
            if source is None:
                way.pop()
                if way:
                    lowest[way[-1][0]] = min(lowest[way[-1][0]], lowest[name])
                if lowest[name] == seen[name]:
                    part: list[str] = []
                    while not part or part[-1] != name:
                        part.append(open_.popitem()[0])
                    found.append(sorted(part, key=place.__getitem__))
            elif source not in seen:
                seen[source] = lowest[source] = len(seen)
                open_[source] = None
                way.append((source, iter(before[source])))
            elif source in open_:
                lowest[name] = min(lowest[name], seen[source])
    return found


def in_order(parts: Sequence[Sequence[str]], before: Edges) -> list[list[str]]:
    """The parts in topological order; of those that could come next, the one whose first node comes first."""
    place = {name: index for index, name in enumerate(before)}
    part_of = {name: part for part, names in enumerate(parts) for name in names}
    sources = [
        {part_of[source] for name in names for source in before[name]} - {part} for part, names in enumerate(parts)
    ]
    users: list[list[int]] = [[] for _ in parts]
    for part, own in enumerate(sources):
        for source in own:
            users[source].append(part)
    waiting = [len(own) for own in sources]
    ready = [(place[names[0]], part) for part, names in enumerate(parts) if not waiting[part]]
    heapq.heapify(ready)
    ordered: list[list[str]] = []
    while ready:
        _, part = heapq.heappop(ready)
        ordered.append(list(parts[part]))
        for user in users[part]:
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(ready, (place[parts[user][0]], user))
    return ordered
