"""A trace and a limit, made ready for the planning methods, and the choices that these make."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from copy import copy
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from torch_lms.plan.candidates import Candidate, CandidateArrays, find_candidates, with_dropped
from torch_lms.plan.decision import DROP_UNCHANGED, RECOMPUTE, SWAP, Decision
from torch_lms.plan.demand import Demand, find_demand
from torch_lms.plan.simulator import simulate
from torch_lms.plan.trace import Trace

__all__ = ["Choices", "Problem"]

_LARGE_SHARE = 1 / 128  # of a limit: up to there, others leave blocks that are as large

Choices = dict[int, str]
"""What is decided for candidates, by their number: swap, drop_unchanged or recompute."""


class Problem:
    """What is asked of a planning method.

    Args:
        trace: of the program.
        limit_bytes: of the device's memory.
        host_limit_bytes: of the host's memory for swapped storages; None for no limit.
        swap: whether storages may leave by a copy.
        recompute: whether they may be dropped and made again.

    Attributes:
        candidates: all stretches in which storages may be away.
        arrays: their figures.
        durations_us: of the ops.
        elapsed_us: from the end of the op before to each op's, without a plan: its duration, and what the device
            waits for the host.
        plain_bytes: in use at each place if all is kept.
        served: decisions for storages that stay on the host; these are settled.
    """

    def __init__(
        self,
        trace: Trace,
        limit_bytes: int,
        *,
        host_limit_bytes: int | None = None,
        swap: bool = True,
        recompute: bool = True,
    ) -> None:
        self.trace = trace
        self.limit_bytes = limit_bytes
        self.host_limit_bytes = host_limit_bytes
        self.swap, self.recompute = swap, recompute
        self.candidates = find_candidates(trace, swap=swap, recompute=recompute)
        self.arrays = CandidateArrays(self.candidates)
        self.durations_us: NDArray[np.float64] = np.array([op.duration_us for op in trace.ops])
        self.elapsed_us = self._elapsed_us()
        self._settle([])

    def _elapsed_us(self) -> NDArray[np.float64]:
        if not self.trace.host.op_us:
            return self.durations_us
        found: NDArray[np.float64] = np.diff(np.array(simulate(self.trace, []).end_us), prepend=0.0)
        return found

    def under(self, limit_bytes: int) -> Problem:
        """The same under another limit."""
        other = copy(self)
        other.limit_bytes = limit_bytes
        return other

    def serving(self, served: Collection[Decision]) -> Problem:
        """The same with these storages on the host. What is made from them is not made again: that would need them."""
        settled = {one.storage for one in served}
        left = [one for one in self.candidates if one.storage not in settled]
        return self._with([replace(one, replay=None) if self._reads(one, settled) else one for one in left], served)

    def _reads(self, candidate: Candidate, storages: Collection[int]) -> bool:
        """Whether a recompute does."""
        if candidate.replay is None or candidate.back_at is None:
            return False
        recipes = (self.trace.storages[one].recompute for one in (candidate.storage, *candidate.replay.dropped))
        return any(one in storages for recipe in recipes if recipe is not None for one in recipe.inputs)

    def handing_on(self) -> Problem:
        """The same where what the next cycle uses is there at the end of this one: no copy in of it is simulated."""
        kept = self.trace.handed_on
        return self._with(
            [one for one in self.candidates if one.back_at is not None or one.storage not in kept], self.served
        )

    def _with(self, candidates: list[Candidate], served: Collection[Decision]) -> Problem:
        other = copy(self)
        other.candidates = candidates
        other.arrays = CandidateArrays(candidates)
        other._settle(served)
        return other

    def _settle(self, served: Iterable[Decision]) -> None:
        """These storages are on the host, and that is all that is known."""
        self.served = tuple(served)
        # Choices come again, under other limits too: `under` shares what is known of them.
        self._demands: dict[frozenset[tuple[int, str]], Demand] = {}
        self._decided: dict[tuple[int, str, int | None], Decision] = {}
        self.plain_bytes = self.demand({}).memory_bytes

    def keeping(self, anchors: Collection[int]) -> Problem:
        """The same without the recompute of some storages."""
        other = copy(self)
        other.candidates = [replace(one, replay=None) if one.storage in anchors else one for one in self.candidates]
        other._demands = {}
        return other

    def dropping(self, spent: Collection[int]) -> Problem:
        """The same in which recipes hold all their spent inputs but these, which are dropped too."""
        other = copy(self)
        other.candidates = [
            one if one.replay is None else replace(one, replay=with_dropped(self.trace, one, spent))
            for one in self.candidates
        ]
        other._demands = {}
        return other

    def least_need(self) -> NDArray[np.float64]:
        """What is in use at each place if all that may be swapped is away, in bytes."""
        relief = np.zeros(len(self.durations_us) + 1)
        for one in self.candidates:
            if one.swappable:
                relief[one.out_after + 1] += one.bytes
                relief[one.end + 1] -= one.bytes
                relief[0] += one.bytes if one.wrapped_end >= 0 else 0
                relief[one.wrapped_end + 1] -= one.bytes if one.wrapped_end >= 0 else 0
        found: NDArray[np.float64] = self.plain_bytes - np.cumsum(relief)[:-1]
        return found

    def demand(self, choices: Mapping[int, str]) -> Demand:
        """What a steady cycle of choices asks for if everything comes in only when it is needed."""
        key = frozenset(choices.items())
        if key not in self._demands:
            self._demands[key] = find_demand(self.trace, self.decisions(choices))
        return self._demands[key]

    def need(self, choices: Mapping[int, str]) -> NDArray[np.float64]:
        """What choices need at each place, in bytes."""
        return self.demand(choices).memory_bytes.copy()

    def excess(self, choices: Mapping[int, str]) -> NDArray[np.float64]:
        """By how much choices exceed the limit at each place, in bytes; 0 where they do not."""
        found: NDArray[np.float64] = np.maximum(self.need(choices) - self.limit_bytes, 0.0)
        return found

    def host_us(self, number: int, kind: str) -> float:
        """What a choice takes of the host's time."""
        one, host = self.candidates[number], self.trace.host
        if kind == RECOMPUTE:
            return host.recompute_us * (1 + (0 if one.replay is None else len(one.replay.dropped)))
        out_us = 0.0 if kind == DROP_UNCHANGED else host.pageout_us
        return out_us + (0.0 if one.back_at is None else host.pagein_us)

    def piece_us(self, number: int) -> float:
        """What a swap of it costs besides its copies: what lasts comes back to where others have been, in one piece.

        On CUDA, where that is much of the limit, as much is copied out of its way.
        """
        one, trace = self.candidates[number], self.trace
        if one.back_at is None or not trace.storages[one.storage].lasting or not trace.device.startswith("cuda"):
            return 0.0
        share = one.bytes / max(1, self.limit_bytes)
        return trace.link.in_us(one.bytes) * min(1.0, max(0.0, share / _LARGE_SHARE - 1.0))

    @property
    def host_slack_us(self) -> float:
        """The host's time that is left beside the device's ops; negative where the device waits for the host."""
        return float(self.durations_us.sum()) - sum(self.trace.host.op_us)

    def leave_kind(self, candidate: Candidate) -> str:
        """How a candidate leaves if it is not dropped."""
        return DROP_UNCHANGED if candidate.unchanged else SWAP

    def decisions(self, choices: Mapping[int, str], in_after: Mapping[int, int] | None = None) -> list[Decision]:
        """The decisions that choices come to, with those for the spent inputs that are dropped too.

        Args:
            choices: by candidate.
            in_after: by candidate, the place after which it may come in; the others come in when they are used.
        """
        made: dict[tuple[int, int], Decision] = {}
        spent: dict[tuple[int, int], Decision] = {}
        for number, kind in choices.items():
            one = self.candidates[number]
            back = None if in_after is None or kind == RECOMPUTE else in_after.get(number)
            key = number, kind, back
            if key not in self._decided:
                self._decided[key] = Decision(
                    storage=one.storage, decision=kind, out_after=one.out_after, in_after=back
                )
            made[one.storage, one.out_after] = self._decided[key]
            if kind == RECOMPUTE and one.replay is not None:
                spent.update(self._drops(one.replay.dropped))
        settled = {(one.storage, -1): one for one in self.served}
        return sorted({**spent, **made, **settled}.values(), key=lambda one: (one.out_after or 0, one.storage))

    def _drops(self, storages: Iterable[int]) -> dict[tuple[int, int], Decision]:
        drops = {}
        for storage in storages:
            last = self.trace.storages[storage].last_access
            assert last is not None
            drops[storage, last] = Decision(storage=storage, decision=RECOMPUTE, out_after=last)
        return drops
