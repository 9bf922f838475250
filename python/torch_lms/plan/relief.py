"""Chooses candidates one after the other until no place is above the limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torch_lms.plan.decision import DROP_UNCHANGED, RECOMPUTE, SWAP
from torch_lms.plan.problem import Choices, Problem
from torch_lms.plan.windows import LinkWindows

__all__ = ["Offer", "Order", "relieve"]

Floats = NDArray[np.float64]
_ROUNDS_AT_MOST = 250
_NEVER = np.inf
_IDLE_PRICE = 0.1  # of what takes the time of a host that has some left


@dataclass(frozen=True)
class Offer:
    """What each candidate would cost and give now.

    Attributes:
        swap_us: time lost by a swap beyond what hides behind compute; infinite where it may not.
        replay_us: time lost by a recompute; infinite where it may not.
        swap_bytes: saved by a swap.
        replay_bytes: saved by a recompute, less what it holds.
        most_bytes: above the limit at any place.
        needy: the share of the places above the limit that it relieves.
        slack_us: free time between its copies.
        swap_beside_us: what a swap takes of the host's time, if there is no other use for that, and for its piece.
        replay_beside_us: the same of a recompute.
    """

    swap_us: Floats
    replay_us: Floats
    swap_bytes: Floats
    replay_bytes: Floats
    most_bytes: float
    needy: Floats
    slack_us: Floats
    swap_beside_us: Floats
    replay_beside_us: Floats


Order = Callable[[Offer], tuple[Floats, Floats]]
"""Ranks candidates: keys of their swap and of their recompute, the least first."""


def relieve(problem: Problem, choices: Choices, excess_bytes: Floats, order: Order) -> Choices:
    """Adds choices until the candidates' sizes make up for the excess, or none is left that helps.

    Args:
        problem: what is asked.
        choices: made before; they are kept.
        excess_bytes: above the limit at each place, with these choices.
        order: which candidate is next.

    Returns:
        All choices, old and new.
    """
    relief = _Relief(problem, choices, excess_bytes)
    while relief.take(order):
        pass
    return relief.choices


class _Relief:
    def __init__(self, problem: Problem, choices: Choices, excess_bytes: Floats) -> None:
        self._problem = problem
        self.choices = dict(choices)
        self._need = excess_bytes.astype(np.float64).copy()
        arrays, candidates = problem.arrays, problem.candidates
        replays = [one.replay for one in candidates]
        self._replay_us = np.array([_NEVER if way is None else way.total_us for way in replays])
        self._replay_bytes = np.array([0.0 if way is None else float(way.net_bytes) for way in replays])
        self._swappable = np.array([one.swappable for one in candidates], dtype=bool)
        self._unchanged = np.array([one.unchanged for one in candidates], dtype=bool)
        last = len(problem.durations_us)
        back = [last if one.back_at is None else one.back_at for one in candidates]
        self._back = np.array(back, dtype=np.int64)
        self._returns = np.array([one.back_at is not None for one in candidates], dtype=bool)
        numbers = range(len(candidates))
        self._host_left_us = problem.host_slack_us if problem.trace.host.op_us else 0.0
        self._swap_host_us = np.array([problem.host_us(i, problem.leave_kind(candidates[i])) for i in numbers])
        self._replay_host_us = np.array([problem.host_us(i, RECOMPUTE) for i in numbers])
        self._piece_us = np.array([problem.piece_us(i) for i in numbers])
        self._open = np.ones(len(candidates), dtype=bool)
        # The windows go on into the next cycle, where storages that last come back.
        self._windows = LinkWindows(np.tile(problem.durations_us, 2), problem.trace.link)
        self._batch = 1 + len(candidates) // _ROUNDS_AT_MOST
        self._arrays, self._slack_us = arrays, arrays.sums(problem.durations_us)
        self._wraps = arrays.wrapped_end > 0
        self._last_end = np.where(self._wraps, arrays.wrapped_end, arrays.end)
        self._on_host: set[int] = set()
        self._host_left_bytes = np.inf if problem.host_limit_bytes is None else float(problem.host_limit_bytes)
        for number, kind in choices.items():
            self._close(number, kind)

    def take(self, order: Order) -> bool:
        """Takes the next few candidates; False if nothing is needed or nothing helps."""
        if not (self._need > 0).any() or not self._open.any():
            return False
        offer = self._offer()
        swap_key, replay_key = order(offer)
        helps = self._open & (offer.needy > 0)
        swap_key = np.where(helps & np.isfinite(offer.swap_us), swap_key, _NEVER)
        replay_key = np.where(helps & np.isfinite(offer.replay_us), replay_key, _NEVER)
        best = np.minimum(swap_key, replay_key)
        # Of what costs no time, what needs no copy out goes first: it takes half of the link's time.
        free = self._unchanged & (offer.swap_us <= 0.0) & (swap_key < _NEVER)
        taken = False
        for number in _first(best, free, self._batch):
            swapped = bool(free[number]) or swap_key[number] <= replay_key[number]
            if not self._still_helps(number) or (swapped and not self._host_holds(number)):
                continue
            kind = RECOMPUTE if not swapped else DROP_UNCHANGED if self._unchanged[number] else SWAP
            self.choices[number] = kind
            self._close(number, kind)
            self._lower(number, kind)
            taken = True
        return taken

    def _offer(self) -> Offer:
        arrays, needy = self._arrays, self._need > 0
        places = len(needy)
        price = 1.0 if self._host_left_us <= 0 else _IDLE_PRICE
        share = arrays.sums(needy.astype(np.float64)) / max(1, int(needy.sum()))
        at = np.arange(places)
        needy_from = np.append(np.minimum.accumulate(np.where(needy, at, places)[::-1])[::-1], places)
        needy_before = np.concatenate(([-1], np.maximum.accumulate(np.where(needy, at, -1))))
        first_needy = np.minimum(needy_from[arrays.first], arrays.end)
        tail = needy_before[self._last_end]
        last_needy = np.where(self._wraps & (tail >= 0), tail + places, tail)
        in_first = np.maximum(np.maximum(last_needy + 1, arrays.first), 0)
        out_us = self._windows.exposed_out_us(arrays.size_bytes, arrays.first, first_needy)
        out_us = np.where(self._unchanged, 0.0, out_us)
        in_us = self._windows.exposed_in_us(arrays.size_bytes, np.minimum(in_first, self._back), self._back)
        in_us = np.where(self._returns, in_us, 0.0)
        return Offer(
            swap_us=np.where(self._swappable & (arrays.size_bytes <= self._host_left_bytes), out_us + in_us, _NEVER),
            replay_us=self._replay_us,
            swap_bytes=arrays.size_bytes,
            replay_bytes=self._replay_bytes,
            most_bytes=float(self._need.max()),
            needy=share,
            slack_us=self._slack_us,
            swap_beside_us=price * self._swap_host_us + self._piece_us,
            replay_beside_us=price * self._replay_host_us,
        )

    def _still_helps(self, number: int) -> bool:
        return any((self._need[places] > 0).any() for places in self._problem.candidates[number].places)

    def _host_holds(self, number: int) -> bool:
        one = self._problem.candidates[number]
        return one.storage in self._on_host or one.bytes <= self._host_left_bytes

    def _close(self, number: int, kind: str) -> None:
        one = self._problem.candidates[number]
        self._open[number] = False
        self._host_left_us -= self._problem.host_us(number, kind)
        if kind == RECOMPUTE:
            self._host_left_us += self._replay_us[number] if np.isfinite(self._replay_us[number]) else 0.0
            return
        if one.storage not in self._on_host:
            self._on_host.add(one.storage)
            self._host_left_bytes -= one.bytes
        if not one.unchanged:
            self._windows.take_out(one.bytes, one.out_after + 1)
        if one.back_at is not None:
            self._windows.take_in(one.bytes, one.back_at)

    def _lower(self, number: int, kind: str) -> None:
        one = self._problem.candidates[number]
        for places in one.places:
            self._need[places] -= one.bytes
        if kind != RECOMPUTE or one.replay is None:
            return
        for held in one.replay.held:
            released = self._problem.trace.storages[held].released
            if released is not None:
                self._need[released + 1 : one.back_at] += self._problem.trace.storages[held].bytes


def _first(keys: Floats, before_others: NDArray[np.bool_], count: int) -> list[int]:
    """The numbers of the least keys, of equal ones the lowest numbers; infinite ones are left out."""
    found: list[int] = []
    for those in (before_others, ~before_others & (keys < _NEVER)):
        numbers = np.flatnonzero(those)
        left = count - len(found)
        if len(numbers) > left > 0:
            numbers = numbers[keys[numbers] <= np.partition(keys[numbers], left - 1)[left - 1]]
        found += numbers[np.argsort(keys[numbers], kind="stable")[:left]].tolist()
    return found
