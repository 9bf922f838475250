"""Makes choices fit the limit as the simulator sees it, takes back what is not needed, and times the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from torch_lms.plan.decision import RECOMPUTE, Decision
from torch_lms.plan.greedy import least_loss
from torch_lms.plan.prefetch import place_in_turn, place_prefetches
from torch_lms.plan.problem import Choices, Problem
from torch_lms.plan.relief import relieve
from torch_lms.plan.replays import copied_instead
from torch_lms.plan.simulator import simulate
from torch_lms.plan.timeline import Timeline

__all__ = ["Timed", "fit", "host_fits", "take_back", "time_choices"]

_REPAIRS_AT_MOST = 12
_LEAD_SHARE = 0.01  # of a cycle: copies in end that much before they must, where memory allows
_WORTH_WAITS = 0.002  # of a cycle: waits below that are not worth another simulation


@dataclass(frozen=True)
class Timed:
    """Choices with what the simulator says of them."""

    choices: Choices
    decisions: list[Decision]
    timeline: Timeline

    def better_than(self, other: Timed | None) -> bool:
        """Whether it keeps the limit and is faster; of two that do not keep it, exceeds it less."""
        if other is None:
            return True
        mine, theirs = self.timeline, other.timeline
        if mine.feasible != theirs.feasible:
            return mine.feasible
        if not mine.feasible:
            return mine.excess_bytes < theirs.excess_bytes
        return (mine.step_us, mine.out_bytes + mine.in_bytes) < (theirs.step_us, theirs.out_bytes + theirs.in_bytes)


def fit(problem: Problem, choices: Choices, *, copying: bool = False) -> Choices:
    """Adds choices until memory fits at every place, or none is left that helps.

    Args:
        problem: what is asked.
        choices: to begin with.
        copying: whether then, where replays take the room, some are copied instead.
    """
    for _ in range(_REPAIRS_AT_MOST):
        excess = problem.excess(choices)
        if not excess.any():
            return choices
        more = relieve(problem, choices, excess, least_loss)
        if copying and len(more) == len(choices):
            more = copied_instead(problem, choices, excess)
        if more == choices:
            return choices
        choices = more
    return choices


def host_fits(problem: Problem, choices: Choices) -> bool:
    """Whether the host can hold what these choices swap."""
    if problem.host_limit_bytes is None:
        return True
    decisions = problem.decisions(choices)
    return simulate(problem.trace, decisions).host_peak_bytes <= problem.host_limit_bytes


def take_back(problem: Problem, choices: Choices) -> Choices:
    """Takes back the dearest choices that memory has room for."""
    room = problem.limit_bytes - problem.need(choices)
    left = dict(choices)
    for number in sorted(choices, key=lambda number: (-_price(problem, number, choices[number]), number)):
        one = problem.candidates[number]
        parts = [room[places] for places in one.places]
        if all((part >= one.bytes).all() for part in parts):
            for part in parts:
                part -= one.bytes
            del left[number]
    if len(left) == len(choices) or problem.excess(left).any():
        return choices
    return left


def _price(problem: Problem, number: int, kind: str) -> float:
    one = problem.candidates[number]
    replay_us = 0.0 if one.replay is None else one.replay.total_us
    own_us = replay_us if kind == RECOMPUTE else problem.piece_us(number)
    return (own_us + problem.host_us(number, kind)) / one.bytes


def time_choices(problem: Problem, choices: Choices) -> Timed:
    """Places the prefetches and simulates: late, with a lead; while compute waits in turn, then late with its waits."""
    lead_us = _LEAD_SHARE * float(problem.durations_us.sum())
    best = first = _simulated(problem, choices, place_prefetches(problem, choices, lead_us=lead_us))
    if _waits(best):
        best = _better(best, _simulated(problem, choices, place_in_turn(problem, choices)))
    if _waits(best):
        best = _better(best, _late(problem, choices, first))
    if _waits(best) and best is not first:
        best = _better(best, _late(problem, choices, best))
    return best


def _late(problem: Problem, choices: Choices, before: Timed) -> Timed:
    """As late as the waits allow that the same choices have had before."""
    wait_us = np.array(before.timeline.wait_us)
    return _simulated(problem, choices, place_prefetches(problem, choices, wait_us=wait_us))


def _better(one: Timed, other: Timed) -> Timed:
    return other if other.better_than(one) else one


def _waits(timed: Timed) -> bool:
    return timed.timeline.waits_us > _WORTH_WAITS * timed.timeline.step_us


def _simulated(problem: Problem, choices: Choices, in_after: Mapping[int, int]) -> Timed:
    decisions = problem.decisions(choices, in_after)
    return Timed(choices, decisions, simulate(problem.trace, decisions, problem.limit_bytes))
