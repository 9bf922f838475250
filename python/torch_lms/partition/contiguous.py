"""The contiguous stages of one topological order: which cuts to look at, and the best of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torch_lms.partition.costs import CostModel, DeviceSpec
from torch_lms.partition.cut_search import Best, CutSearch
from torch_lms.partition.cut_table import CutTable
from torch_lms.partition.link_spec import LinkSpec
from torch_lms.partition.sequence import UnitSequence

__all__ = ["ContiguousStages", "Found"]

Ints = NDArray[np.int64]

_CELLS = 2e7  # numbers in all matrices: 160 MB
_SPREAD_CELLS = 5e6  # the same, where not all cuts fit anyway


@dataclass(frozen=True, kw_only=True)
class Found:
    """Cuts between stages, in positions of the order.

    Attributes:
        cuts: one fewer than stages.
        step_us: that the schedule makes of them.
        gap_us: how much shorter a step over the cuts looked at could be, as far as is known; 0 where none is.
        every_cut: whether all cuts of the order were looked at.
    """

    cuts: tuple[int, ...]
    step_us: float
    gap_us: float
    every_cut: bool

    @property
    def optimal(self) -> bool:
        """Whether no contiguous stages of this order give a shorter step."""
        return self.every_cut and self.gap_us <= 1e-6 * self.step_us


class ContiguousStages:
    """All ways to cut one order for devices in one order.

    Args:
        sequence: the order.
        devices: of the stages.
        links: between them.
        model: prices.
        most_cells: bound on memory, as numbers in all matrices.
    """

    def __init__(
        self,
        sequence: UnitSequence,
        devices: Sequence[DeviceSpec],
        links: Sequence[LinkSpec],
        model: CostModel,
        most_cells: float = _CELLS,
    ) -> None:
        self.sequence = sequence
        self.devices = devices
        self.links = links
        self.model = model
        every = int((most_cells / len(devices)) ** 0.5)
        self.looks_at_all = len(sequence) + 1 <= max(every, 4 * len(devices) + 1)
        some = int((min(most_cells, _SPREAD_CELLS) / len(devices)) ** 0.5)
        self.most_cuts = max(some, 4 * len(devices) + 1)

    def solve(self) -> Found | None:
        """The cuts with the shortest step that fit, or None if none were found; see Note [Bounded search].

        Where there are too many cuts for one table, first a spread of cheap ones is looked at, then all around those
        chosen.
        """
        cuts = self._spread()
        if self.looks_at_all:
            return self._found(cuts, self._search(cuts).prove())
        first = self._found(cuts, self._search(cuts).find())
        if first is None:
            return None
        near = self._near(first.cuts)
        return min(first, self._found(near, self._search(near).prove()) or first, key=lambda one: one.step_us)

    def estimate(self) -> float:
        """About how short a step these cuts allow; infinite where none that fit were found."""
        best = self._search(self._spread()).find()
        return best.step_us if best is not None and best.fits else float("inf")

    def least_memory(self) -> tuple[float, tuple[int, ...], bool]:
        """The smallest factor on all caps with which some cuts fit, those cuts, and whether none is smaller."""
        cuts = self._spread()
        factor, marks, exact = self._search(cuts).least_memory()
        if not self.looks_at_all:
            cuts = np.union1d(cuts, self._near([int(cuts[mark]) for mark in marks[1:-1]]))
            factor, marks, _ = self._search(cuts).least_memory()
        return factor, tuple(int(cuts[mark]) for mark in marks[1:-1]), exact and self.looks_at_all

    def _search(self, cuts: Ints) -> CutSearch:
        return CutSearch(CutTable(self.sequence, self.devices, self.links, self.model, cuts))

    def _found(self, cuts: Ints, best: Best | None) -> Found | None:
        if best is None or not best.fits:
            return None
        return Found(
            cuts=tuple(int(cuts[mark]) for mark in best.marks[1:-1]),
            step_us=best.step_us,
            gap_us=max(best.step_us - best.bound_us, 0.0),
            every_cut=self.looks_at_all,
        )

    def _spread(self) -> Ints:
        """All cuts, or of each equal share of time the one that the fewest bytes cross."""
        end = len(self.sequence)
        if self.looks_at_all:
            return np.arange(end + 1)
        nbytes = self.sequence.cut_forward_bytes + self.sequence.cut_backward_bytes
        before = self.sequence.time_before_us
        share = np.floor(before / max(before[-1], 1e-300) * (self.most_cuts - 2)).astype(np.int64)
        ordered = np.lexsort((nbytes, share))
        first = np.concatenate([[True], np.diff(share[ordered]) > 0])
        return np.unique(np.concatenate([[0], ordered[first], [end]]))

    def _near(self, cuts: Sequence[int]) -> Ints:
        """The cuts around those."""
        end = len(self.sequence)
        reach = max((self.most_cuts - 2) // (2 * max(len(cuts), 1)) - 1, 1)
        around = [np.arange(max(cut - reach, 0), min(cut + reach, end) + 1) for cut in cuts]
        return np.unique(np.concatenate([[0], *around, [end]]))
