"""Topological orders worth cutting: graphs with branches have many, and their cuts differ."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from torch_lms.partition.units import Units

__all__ = ["candidate_orders"]

Ints = NDArray[np.int64]
_LOOKED_AT = 64


def candidate_orders(units: Units) -> dict[str, Ints]:
    """Different topological orders by name, the graph's own first."""
    orders: dict[str, Ints] = {}
    if units.chain:
        return {"given": _given(units)}
    for name, make in (("given", _given), ("depth-first", _depth_first), ("breadth-first", _breadth_first)):
        _add(orders, name, make(units))
    if len(orders) > 1:
        _add(orders, "least live bytes", _least_live(units))
    return orders


def _add(orders: dict[str, Ints], name: str, order: Ints) -> None:
    if not any(np.array_equal(order, known) for known in orders.values()):
        orders[name] = order


def _given(units: Units) -> Ints:
    return np.arange(len(units))


def _depth_first(units: Units) -> Ints:
    """Finishes one branch before it begins the next: reversed postorder."""
    done = np.zeros(len(units), dtype=bool)
    finished: list[int] = []
    for root in range(len(units) - 1, -1, -1):
        if done[root] or units.inputs[root]:
            continue
        stack = [(root, iter(reversed(units.users[root])))]
        done[root] = True
        while stack:
            unit, users = stack[-1]
            user = next((user for user in users if not done[user]), None)
            if user is None:
                finished.append(unit)
                stack.pop()
            else:
                done[user] = True
                stack.append((user, iter(reversed(units.users[user]))))
    return np.array(finished[::-1], dtype=np.int64)


def _breadth_first(units: Units) -> Ints:
    """By the longest way from an input."""
    level = [0] * len(units)
    for unit, inputs in enumerate(units.inputs):
        level[unit] = 1 + max((level[source] for source in inputs), default=-1)
    return np.lexsort((np.arange(len(units)), np.array(level)))


def _least_live(units: Units) -> Ints:
    """Next is always the unit after which the fewest bytes are still to be read."""
    size: dict[int, int] = {}
    for value in units.values:
        size[value.producer] = size.get(value.producer, 0) + value.forward_bytes + value.backward_bytes
    readers = [len(users) for users in units.users]
    waiting = [len(inputs) for inputs in units.inputs]
    ready = [unit for unit, count in enumerate(waiting) if count == 0]
    order: list[int] = []

    def growth(unit: int) -> tuple[int, int]:
        freed = sum(size.get(source, 0) for source in units.inputs[unit] if readers[source] == 1)
        return (size.get(unit, 0) if readers[unit] else 0) - freed, unit

    while ready:
        unit = min(heapq.nsmallest(_LOOKED_AT, ready) if len(ready) > _LOOKED_AT else ready, key=growth)
        ready.remove(unit)
        order.append(unit)
        for source in units.inputs[unit]:
            readers[source] -= 1
        for user in units.users[unit]:
            waiting[user] -= 1
            if waiting[user] == 0:
                ready.append(user)
    return np.array(order, dtype=np.int64)
