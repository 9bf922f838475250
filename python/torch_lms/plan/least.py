"""The least limit that a plan can keep, and the plans for limits so low that the methods find none."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from torch_lms.plan.decision import HOST, RECOMPUTE, Decision
from torch_lms.plan.greedy import greedy
from torch_lms.plan.methods import short_chains
from torch_lms.plan.problem import Choices, Problem
from torch_lms.plan.repair import fit, host_fits
from torch_lms.plan.trace import Trace

__all__ = ["everything_away", "least_choices", "least_limit", "pressed", "with_served"]

_TRIES = 8
_PRESSED_TRIES = 200


def least_limit(trace: Trace, *, host_limit_bytes: int | None = None, swap: bool = True, recompute: bool = True) -> int:
    """The least limit, in bytes, for which there is a plan; where little may be copied out, for which one is found.

    Args:
        trace: of the program.
        host_limit_bytes: of the host's memory for swapped storages; None for no limit.
        swap: whether storages may leave by a copy.
        recompute: whether they may be dropped and made again.
    """
    problem = Problem(trace, 0, host_limit_bytes=host_limit_bytes, swap=swap, recompute=recompute)
    found = []
    for given in (problem, with_served(problem)):
        found += [peak for choices in least_choices(given) if (peak := _peak_bytes(given, choices)) is not None]
    return int(min(found))


def _peak_bytes(problem: Problem, choices: Choices) -> float | None:
    if not host_fits(problem, choices):
        return None
    return float(problem.need(choices).max())


def least_choices(problem: Problem) -> Iterator[Choices]:
    """Choices that need little memory, whatever the limit of the problem; keeping everything is the first."""
    yield {}
    yield everything_away(problem)
    if problem.swap and problem.host_limit_bytes is None:
        return  # nothing needs less than what has all away that is not in use
    fails, keeps = 0.0, float(problem.plain_bytes.max())
    for _ in range(_TRIES):
        lower = problem.under(int((fails + keeps) / 2))
        for choose in (greedy, short_chains):
            choices = fit(lower, choose(lower))
            yield choices
            if not lower.excess(choices).any():
                keeps = float(lower.need(choices).max())
                break
        else:
            fails = lower.limit_bytes


def everything_away(problem: Problem) -> Choices:
    """All candidates away as long as they can be: by a copy where that is allowed, dropped elsewhere."""
    choices: Choices = {}
    for number, one in enumerate(problem.candidates):
        if one.replay is not None and (one.back_at is None or not one.swappable):
            choices[number] = RECOMPUTE
        elif one.swappable:
            choices[number] = problem.leave_kind(one)
    return choices


def pressed(problem: Problem) -> Choices:
    """From everything away by copies, as many recomputes as memory allows, those first that gain the most time.

    Those that take longer than the copies only where the host has no room for these.
    """
    choices = everything_away(problem)
    link = problem.trace.link
    gains = {
        number: link.out_us(one.bytes) + link.in_us(one.bytes) - one.replay.total_us
        for number, one in enumerate(problem.candidates)
        if one.replay is not None and choices[number] != RECOMPUTE
    }
    order = sorted(gains, key=lambda number: (-gains[number], number))
    choices = _with_recomputes(problem, choices, [number for number in order if gains[number] > 0])
    if host_fits(problem, choices):
        return choices
    return _with_recomputes(problem, choices, [number for number in order if gains[number] <= 0])


def _with_recomputes(problem: Problem, choices: Choices, order: list[int]) -> Choices:
    """Of these candidates as many by recompute as memory allows; the earlier ones first."""
    blocks = [order]
    for _ in range(_PRESSED_TRIES):
        if not blocks:
            break
        block = blocks.pop()
        tried = choices | dict.fromkeys(block, RECOMPUTE)
        if not problem.excess(tried).any():
            choices = tried
        elif len(block) > 1:  # one of them makes others again too early, say: the rest of them may do
            half = len(block) // 2
            blocks += [block[half:], block[:half]]
    return choices


def with_served(problem: Problem) -> Problem:
    """The problem, with storages that ops read from the host where what one op uses does not fit the limit."""
    if not problem.swap:
        return problem
    trace, need = problem.trace, problem.least_need()
    served: dict[int, Decision] = {}
    for place in (int(one) for one in np.argsort(-need, kind="stable")):
        over_bytes = need[place] - problem.limit_bytes
        if over_bytes <= 0:
            break
        present = [one for one in trace.by_place.used[place] if _servable(trace, one, place)]
        over_bytes -= sum(trace.storages[one].bytes for one in present if one in served)
        left = [one for one in present if one not in served]
        for one in sorted(left, key=lambda one: (len(trace.storages[one].uses), -trace.storages[one].bytes, one)):
            if over_bytes <= 0:
                break
            served[one] = Decision(storage=one, decision=HOST, out_after=_first_access(trace, one))
            over_bytes -= trace.storages[one].bytes
    made = problem.serving(served.values()) if served else problem
    if served and problem.limit_bytes > 0 and made.excess(everything_away(made)).any():
        return with_served(problem.under(0)).under(problem.limit_bytes)  # whatever can be there
    return made


def _servable(trace: Trace, number: int, place: int) -> bool:
    storage = trace.storages[number]
    return storage.movable and bool(storage.bytes) and (storage.lasting or place > _first_access(trace, number))


def _first_access(trace: Trace, number: int) -> int:
    storage = trace.storages[number]
    if storage.lasting:
        return storage.uses[-1]
    return storage.uses[0] if storage.producer is None else storage.producer
