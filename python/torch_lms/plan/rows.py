"""A linear program row by row, solved by SciPy's HiGHS."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Rows", "Solution"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_PROVEN = 1e-4
_SOLVED, _OUT_OF_TIME, _INFEASIBLE = 0, 1, 2  # what `scipy.optimize.milp` says


@dataclass(frozen=True)
class Solution:
    """Values of all variables, and of what is minimised."""

    values: Floats
    objective: float


class Rows:
    """Variables with bounds and costs, and rows over them; the sum of the costs is minimised."""

    def __init__(self) -> None:
        self._least: list[float] = []
        self._most: list[float] = []
        self._cost: list[float] = []
        self._row: list[int] = []
        self._column: list[int] = []
        self._value: list[float] = []
        self._low: list[float] = []
        self._high: list[float] = []

    def variable(self, *, least: float = 0.0, most: float = np.inf, cost: float = 0.0) -> int:
        """Adds a variable; its number."""
        self._least.append(least)
        self._most.append(most)
        self._cost.append(cost)
        return len(self._cost) - 1

    def at_most(self, row: Mapping[int, float], value: float) -> None:
        """Adds a row: the sum of factors times variables is at most a value."""
        self._add(row, -np.inf, value)

    def equal(self, row: Mapping[int, float], value: float) -> None:
        """Adds a row: the sum of factors times variables is a value."""
        self._add(row, value, value)

    def settle(self, variables: Ints, values: Floats) -> None:
        """Sets variables to values."""
        for variable, value in zip(variables.tolist(), values.tolist(), strict=True):
            self._least[variable] = self._most[variable] = value

    def solve(self) -> Solution | None:
        """The least sum of costs; None if no values keep all rows."""
        found = self._run(None, None)
        if found.x is None:
            return None
        return Solution(np.asarray(found.x, dtype=np.float64), float(found.fun))

    def least(self, *, whole: Ints, seconds: float) -> float:
        """What the sum of costs is never below, as far as that is proven in time.

        Infinite if no values keep all rows, and minus infinity if the time ends before any are found, or the solver
        fails.

        Args:
            whole: variables that must be whole numbers.
            seconds: at most.
        """
        found = self._run(whole, seconds)
        if found.status == _INFEASIBLE:
            return np.inf
        if found.status not in (_SOLVED, _OUT_OF_TIME):
            return -np.inf
        proven = found.mip_dual_bound if len(whole) else found.fun if found.status == _SOLVED else None
        return -np.inf if proven is None else float(proven)

    def _run(self, whole: Ints | None, seconds: float | None) -> Any:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csc_array

        shape = len(self._low), len(self._cost)
        matrix = csc_array((self._value, (self._row, self._column)), shape=shape)
        integrality = np.zeros(shape[1])
        if whole is not None:
            integrality[whole] = 1
        # With whole numbers, HiGHS's presolve may print to the process's standard output.
        options: dict[str, float | bool] = {"mip_rel_gap": _PROVEN, "presolve": whole is None}
        if seconds is not None:
            options["time_limit"] = seconds
        return milp(
            np.array(self._cost),
            integrality=integrality,
            bounds=Bounds(np.array(self._least), np.array(self._most)),
            constraints=LinearConstraint(matrix, np.array(self._low), np.array(self._high)),
            options=options,
        )

    def _add(self, row: Mapping[int, float], low: float, high: float) -> None:
        at = len(self._low)
        self._row.extend([at] * len(row))
        self._column.extend(row.keys())
        self._value.extend(row.values())
        self._low.append(low)
        self._high.append(high)
