"""Times the same work with and without paging in turns, in one process, so that drift hits both alike."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["Comparison", "Scope", "Turns"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """How paging begins and ends around the work that is timed.

    Attributes:
        begin: turns paging on.
        end: turns it off again.
        warm_up: runs of the work after `begin` that are not timed.
    """

    begin: Callable[[], object]
    end: Callable[[], object]
    warm_up: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Medians in seconds.

    Attributes:
        plain: without paging.
        paging: with it.
        added: of the differences between a run with paging and the mean of the two beside it.
        quiet_added: between the lower quartiles of all runs with and without paging; for short work, which other
            processes only ever lengthen.
        ratio: of the quotients of a run with paging and the mean of the two beside it.
        noise: by how much plain runs differ from the mean of the two plain runs beside them, as a part of it.
        rounds: how many there were.
    """

    plain: float
    paging: float
    added: float
    quiet_added: float
    ratio: float
    noise: float
    rounds: int


class Turns:
    """Measures for some seconds.

    Args:
        device: that is waited for.
        budget_s: how long one comparison may take; there are at least seven rounds.
        most_rounds: more are of no use.
    """

    def __init__(self, device: str, *, budget_s: float, most_rounds: int = 60) -> None:
        self.device = device
        self.budget_s = budget_s
        self.most_rounds = most_rounds

    def seconds(self, work: Callable[[], object]) -> float:
        """One run of the work, which is waited for."""
        self._synchronize()
        start = time.perf_counter()
        work()
        self._synchronize()
        return time.perf_counter() - start

    def compare(self, work: Callable[[], object], scope: Scope) -> Comparison:
        """Plain, with paging, plain, and so on; each after runs under the same conditions."""
        end = time.monotonic() + self.budget_s
        plain = [self._plain(work)]
        paging: list[float] = []
        while len(paging) < 7 or (len(paging) < self.most_rounds and time.monotonic() < end):
            scope.begin()
            try:
                for _ in range(scope.warm_up):
                    work()
                paging.append(self.seconds(work))
            finally:
                scope.end()
            plain.append(self._plain(work))
        beside = [(one + other) / 2 for one, other in itertools.pairwise(plain)]
        around = [(one + other) / 2 for one, other in zip(plain, plain[2:], strict=False)]
        return Comparison(
            plain=statistics.median(plain),
            paging=statistics.median(paging),
            added=statistics.median(ours - without for ours, without in zip(paging, beside, strict=True)),
            quiet_added=statistics.quantiles(paging, n=4)[0] - statistics.quantiles(plain, n=4)[0],
            ratio=statistics.median(ours / without for ours, without in zip(paging, beside, strict=True)),
            noise=statistics.median(abs(one / mean - 1) for one, mean in zip(plain[1:], around, strict=False)),
            rounds=len(paging),
        )

    def _plain(self, work: Callable[[], object]) -> float:
        work()
        return self.seconds(work)

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
