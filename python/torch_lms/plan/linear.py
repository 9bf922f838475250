"""A linear program over fractions of keep, swap and recompute; its value is a bound that no plan beats.

Note [Rounds]: what a plan drops may have to be made again early, for something else that is made from it. Which does is
known once it is known what is dropped. So to plan, the program is solved as if nothing came early; then again, with the
places at which what it dropped would be made again. The worst case, that all are dropped that can be, is no guide: in a
mixture of experts it makes plans that take twice as long. To plan, relief ends where a storage has to be back, and what
leaves just before a checkpoint, or is needed just after one, takes room there.

Note [Rounding]: fractions that are nearly whole are rounded, and the program is solved again, so that others make up
for what that adds or takes. Rounded all at once, those of many storages that are alike all go the same way.

Related: POFO (Beaumont et al., NeurIPS 2021) weighs both ways for chains, by dynamic programming; Checkmate (Jain et
al., MLSys 2020) rounds a linear program of what to recompute.
"""

from __future__ import annotations

from importlib.util import find_spec
from math import ceil

import numpy as np

from torch_lms.plan.anchors import find_anchors
from torch_lms.plan.decision import RECOMPUTE
from torch_lms.plan.linear_program import LinearProgram
from torch_lms.plan.problem import Choices, Problem
from torch_lms.plan.rows import Solution
from torch_lms.plan.spent import Dropped

__all__ = ["linear", "linear_bound_us", "scipy_is_there"]

_WHOLE = 1e-4
_ROUNDS = 2
_DIVES = 3
_ROUNDED_AT_ONCE = 2 / 3  # of the fractions


def scipy_is_there() -> bool:
    """Whether SciPy, which solves the program, is installed."""
    return find_spec("scipy") is not None


def linear_bound_us(problem: Problem) -> float | None:
    """The least time of a cycle under the limit, by fractions; None if even these keep no limit.

    Args:
        problem: what is asked.
    """
    relaxed = LinearProgram(problem).rows.solve()
    return None if relaxed is None else float(problem.durations_us.sum()) + max(relaxed.objective, 0.0) * 1e3


def linear(problem: Problem, *, chain_bytes: float) -> tuple[Problem, Choices] | None:
    """Solves the program, then makes its fractions whole, a part of them at a time.

    Args:
        problem: what is asked.
        chain_bytes: that one replay may make again too early; see `find_anchors`.

    Returns:
        The choices, and the problem in which recipes hold or drop their spent inputs as the program does; None if even
        fractions keep no limit.
    """
    problem = problem.keeping(find_anchors(problem, chain_bytes))
    found = _relaxed(problem)
    if found is None:
        return None
    program, solution = found[0], _dive(*found)
    spent = program.dropped(solution).spent
    last = {one.storage: number for number, one in enumerate(problem.candidates) if one.back_at is None}
    tails = {last[storage]: RECOMPUTE for storage in spent if storage in last}
    return problem.dropping(spent), program.choices(solution) | tails


def _dive(program: LinearProgram, solution: Solution) -> Solution:
    """Rounds what is nearest to whole, solves again so that the rest makes up for it, and so on."""
    for _ in range(_DIVES):
        fractions = solution.values[program.fractions]
        distance = np.abs(fractions - np.round(fractions))
        open_ones = np.flatnonzero(distance > _WHOLE)
        if not len(open_ones):
            break
        nearest = open_ones[np.argsort(distance[open_ones], kind="stable")[: ceil(_ROUNDED_AT_ONCE * len(open_ones))]]
        program.rows.settle(program.fractions[nearest], np.round(fractions[nearest]))
        found = program.rows.solve()
        if found is None:
            break
        solution = found
    return solution


def _relaxed(problem: Problem) -> tuple[LinearProgram, Solution] | None:
    """The program of the last of the [Rounds] in which fractions keep the limit, and these; None if there is none."""
    found, dropped = None, Dropped()
    for _ in range(_ROUNDS):
        program = LinearProgram(problem, dropped=dropped)
        relaxed = program.rows.solve()
        if relaxed is None:
            break
        found = program, relaxed
        before = dropped
        dropped = program.dropped(relaxed)
        if dropped == before:
            break
    return found
