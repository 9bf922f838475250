"""The planning methods by name, and how the choices of one become a plan that keeps the limit.

A method counts bytes, not the room that copies need before they end. So where a step loses time under its plan, since
compute waits for copies, or the host does and submits ops later, it plans again for less memory, and its copies use the
rest. Nor does it count what a replay needs beside its storage: where it comes to no plan that keeps the limit, some
storages are copied instead of made again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch_lms.plan.anchors import find_anchors
from torch_lms.plan.dawnpiper import dawnpiper
from torch_lms.plan.greedy import exact_greedy, greedy
from torch_lms.plan.linear import linear
from torch_lms.plan.problem import Choices, Problem
from torch_lms.plan.repair import Timed, fit, take_back, time_choices

__all__ = ["Method", "carry_through", "linear_methods", "short_chains", "simple_methods"]

_LARGE = 2000  # candidates; beyond that there are fewer methods, and each gets fewer tries
_CHAIN_SHARE = 0.25  # of the limit: what one replay may make again before it is used
_SHORT_CHAIN_SHARE = 0.12
_WORTH_LOSS = 0.01  # of a cycle


@dataclass(frozen=True)
class Method:
    """A way to choose.

    Attributes:
        name: in plans.
        choose: choices for a problem, with the problem as the method sees it; None if it finds none.
        shares: of the limit to plan for, the next one where time is lost under the plan for the one before.
    """

    name: str
    choose: Callable[[Problem], tuple[Problem, Choices] | None]
    shares: tuple[float, ...]


def simple_methods(problem: Problem, *, all_of_them: bool = False) -> list[Method]:
    """The methods that need no solver.

    Args:
        problem: what is asked.
        all_of_them: also those that large problems usually do without.
    """
    small = len(problem.candidates) <= _LARGE
    shares = (1.0, 0.96, 0.94, 0.88, 0.75) if small else (1.0, 0.98, 0.95)
    found = [
        Method("greedy", _alone(greedy), shares),
        Method("dawnpiper", _alone(dawnpiper), shares if small else (1.0,)),
    ]
    if small or all_of_them:
        found.append(Method("greedy, exact", _alone(exact_greedy), shares))
        found.append(Method("greedy, short chains", _alone(short_chains), shares))
    return found


def linear_methods(problem: Problem) -> list[Method]:
    """The linear program, for small problems with two lengths of chains."""
    small = len(problem.candidates) <= _LARGE
    if not small:
        # Planned for all of the limit, copies of many small storages wait for each other's room.
        return [Method("linear", _linear_with(_CHAIN_SHARE), (0.98, 1.0))]
    chains = {"linear": _CHAIN_SHARE, "linear, short chains": _SHORT_CHAIN_SHARE}
    return [Method(name, _linear_with(share), (1.0, 0.98, 0.94)) for name, share in chains.items()]


def short_chains(problem: Problem) -> Choices:
    """As `greedy`, where no replay makes much again before it is used.

    Args:
        problem: what is asked.
    """
    calm = problem.keeping(find_anchors(problem, _CHAIN_SHARE * problem.limit_bytes))
    return fit(calm, greedy(calm))


def _alone(choose: Callable[[Problem], Choices]) -> Callable[[Problem], tuple[Problem, Choices]]:
    return lambda problem: (problem, choose(problem))


def _linear_with(chain_share: float) -> Callable[[Problem], tuple[Problem, Choices] | None]:
    def choose(problem: Problem) -> tuple[Problem, Choices] | None:
        return linear(problem, chain_bytes=chain_share * problem.limit_bytes)

    return choose


def carry_through(problem: Problem, method: Method) -> Timed | None:
    """The best that a method comes to.

    Args:
        problem: what is asked.
        method: that chooses.

    Returns:
        Its choices, repaired, timed and without those that memory has room for; None if it made none.
    """
    best: Timed | None = None
    chosen: dict[float, tuple[Problem, Choices] | None] = {}
    for copying in (False, True):
        for share in method.shares:
            if share not in chosen:
                chosen[share] = method.choose(problem.under(int(share * problem.limit_bytes)))
            found = _carry(problem, chosen[share], copying=copying)
            best = found if found is not None and found.better_than(best) else best
            if best is not None and _is_calm(problem, best):
                return best
            if found is not None and problem.excess(found.choices).any():
                break  # with less memory there is no more to choose from
        if best is not None and best.timeline.feasible:
            break
    return best


def _is_calm(problem: Problem, timed: Timed) -> bool:
    timeline = timed.timeline
    lost_us = timeline.step_us - timeline.recompute_us - float(problem.elapsed_us.sum())
    return timeline.feasible and lost_us <= _WORTH_LOSS * timeline.step_us


def _carry(problem: Problem, chosen: tuple[Problem, Choices] | None, *, copying: bool) -> Timed | None:
    if chosen is None:
        return None
    tighter, choices = chosen
    whole = tighter.under(problem.limit_bytes)
    fitted = fit(tighter, choices, copying=copying)
    left = take_back(tighter, fitted)
    timed = time_choices(whole, left)
    if left is not fitted and len(problem.candidates) <= _LARGE:
        more = time_choices(whole, fitted)
        timed = more if more.better_than(timed) else timed
    return timed
