"""Tensors that are updated together, and which of them have been."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

__all__ = ["UpdateGroups"]


@dataclass(eq=False)
class _Group:
    """Tensors of one chunk that are updated together.

    Attributes:
        numbers: of the tensors.
        expected: those that get gradients, as far as is known.
        arrived: those whose gradients are there, since the last step.
    """

    numbers: Sequence[int]
    expected: set[int]
    arrived: set[int] = field(default_factory=set)


class UpdateGroups:
    """Knows when all gradients of a group are there, and what has been updated since the last step.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self.updated: set[int] = set()
        """In backward, since the last step."""
        self._groups: list[_Group] = []
        self._group_of: dict[int, _Group] = {}

    def add(self, numbers: Sequence[int], trained: set[int]) -> None:
        """Another group.

        Args:
            numbers: of its tensors.
            trained: those that an optimizer updates.
        """
        self._groups.append(_Group(numbers, trained))
        self._group_of.update(dict.fromkeys(numbers, self._groups[-1]))

    def arrived(self, number: int) -> list[int]:
        """A gradient has: the tensors that are to be updated now."""
        group = self._group_of[number]
        group.arrived.add(number)
        return sorted(group.arrived - self.updated) if group.arrived >= group.expected else []

    def left(self, has_gradient: Callable[[int], bool]) -> Iterator[list[int]]:
        """At a step: of each group the tensors with gradients that have not been updated."""
        for group in self._groups:
            wanted = list(filter(has_gradient, group.numbers))
            group.expected = set(wanted) | self.updated.intersection(group.numbers)
            yield [number for number in wanted if number not in self.updated]

    def forget_gradients(self) -> None:
        """Those of tensors that have not been updated will come again."""
        for group in self._groups:
            group.arrived &= self.updated

    def step_ended(self) -> None:
        """All begins anew."""
        self.updated.clear()
        for group in self._groups:
            group.arrived.clear()
