"""Why each storage is treated as it is: one sentence with its figures, and what it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch_lms.memory_sizes import in_gib
from torch_lms.plan.decision import DROP_UNCHANGED, HOST, KEEP, RECOMPUTE, Decision
from torch_lms.plan.document import PlannedStorage
from torch_lms.plan.problem import Problem
from torch_lms.plan.timeline import Timeline

__all__ = ["explain_decisions"]


def explain_decisions(problem: Problem, decisions: Sequence[Decision], timeline: Timeline) -> list[PlannedStorage]:
    """The decisions with reasons and prices, and those of all storages that are kept."""
    reasons = _Reasons(problem, decisions, timeline)
    decided = {one.storage for one in decisions}
    kept = (Decision(storage=number, decision=KEEP) for number in range(len(problem.trace.storages)))
    everything = [*decisions, *(one for one in kept if one.storage not in decided)]
    return [reasons.planned(one) for one in sorted(everything, key=lambda one: (one.storage, one.out_after or 0))]


class _Reasons:
    def __init__(self, problem: Problem, decisions: Sequence[Decision], timeline: Timeline) -> None:
        self._problem, self._trace, self._timeline = problem, problem.trace, timeline
        self._kinds = Counter((one.storage, one.decision) for one in decisions)
        self._replays = Counter(storage for place in timeline.replayed.values() for storage in place)
        self._candidates = {(one.storage, one.out_after): one for one in problem.candidates}
        self._able = {one.storage: one for one in problem.candidates}
        self._fits = float(problem.plain_bytes.max()) <= problem.limit_bytes

    def planned(self, given: Decision) -> PlannedStorage:
        """A decision with its reason and price."""
        storage = self._trace.storages[given.storage]
        reason, price_us = self._reason(given)
        return PlannedStorage(
            storage=given.storage,
            decision=given.decision,
            out_after=given.out_after,
            in_after=given.in_after,
            reason=reason,
            price_us=price_us,
            bytes=storage.bytes,
            op=self._trace.op_of(given.storage),
            module=storage.module,
            line=storage.line,
        )

    def _reason(self, given: Decision) -> tuple[str, float]:
        if given.decision == KEEP:
            return self._why_kept(given.storage), 0.0
        if given.decision == RECOMPUTE:
            return self._why_recomputed(given)
        if given.decision == HOST:
            return self._why_served(given.storage)
        return self._why_swapped(given)

    def _why_kept(self, number: int) -> str:
        storage = self._trace.storages[number]
        if self._fits:
            peak = max(self._timeline.memory_bytes)
            return f"Everything fits: the peak is {in_gib(peak)} of {in_gib(self._problem.limit_bytes)}."
        if not storage.movable:
            return f"It cannot leave the device: {storage.why_not_movable or 'no reason is known'}."
        one = self._able.get(number)
        if one is None:
            if self._problem.swap or storage.recompute is not None:
                return "It is never without a use long enough to leave."
            return f"It cannot be made again: {storage.why_not_recompute or 'no reason is known'}."
        again = "it cannot be made again" if one.replay is None else f"a recompute takes {_ms(one.replay.total_us)}"
        return f"Memory fits with it; {again}, and a copy takes {_ms(self._trace.link.out_us(one.bytes))} each way."

    def _why_recomputed(self, given: Decision) -> tuple[str, float]:
        storage = self._trace.storages[given.storage]
        recipe = storage.recompute
        assert recipe is not None
        op, replays = self._trace.op_of(given.storage), self._replays[given.storage]
        copy = _ms(self._trace.link.out_us(storage.bytes))
        price_us = replays * recipe.duration_us / self._kinds[given.storage, RECOMPUTE]
        if not replays:
            return f"Nothing uses it again, so that dropping its {_mib(storage.bytes)} costs nothing.", price_us
        if (given.storage, given.out_after) not in self._candidates:
            return f"Only recipes need it again; {op} makes it in {_ms(recipe.duration_us)}.", price_us
        return (
            f"{op} makes its {_mib(storage.bytes)} again in {_ms(recipe.duration_us)}, where a copy would take {copy} "
            "each way.",
            price_us,
        )

    def _why_swapped(self, given: Decision) -> tuple[str, float]:
        size, link = self._trace.storages[given.storage].bytes, self._trace.link
        waits_us = self._timeline.wait_of.get(given.storage, 0.0) / self._kinds[given.storage, given.decision]
        one = self._candidates.get((given.storage, given.out_after or 0))
        if one is not None and one.back_at is None:
            return f"Nothing uses its {_mib(size)} again in this cycle; it leaves by a copy.", waits_us
        cost = "costs no time" if waits_us <= 0 else f"lets compute wait {_ms(waits_us)}"
        if given.decision == DROP_UNCHANGED:
            return (
                f"Nothing writes it and the host has a copy, so that only coming back, {_ms(link.in_us(size))}, uses "
                f"the link; it {cost}.",
                waits_us,
            )
        free_us = 0.0 if one is None else self._between_us(one.out_after, one.back_at)
        return (
            f"Its copies, {_ms(link.out_us(size))} out and {_ms(link.in_us(size))} in, lie beside {_ms(free_us)} of "
            f"other work; it {cost}.",
            waits_us,
        )

    def _between_us(self, before: int, after: int | None) -> float:
        """Time in the cycle between the end of one place and the start of another, which may be in the next cycle."""
        starts, ends, places = self._timeline.start_us, self._timeline.end_us, len(self._timeline.start_us)
        if after is None:
            return 0.0
        return starts[after % places] + (after // places) * ends[-1] - ends[before]

    def _why_served(self, number: int) -> tuple[str, float]:
        storage = self._trace.storages[number]
        price_us = len(storage.uses) * self._trace.link.in_us(storage.bytes)
        return (
            f"An op needs more than {in_gib(self._problem.limit_bytes)} at once, so that {len(storage.uses)} ops read "
            f"it from the host, {_ms(price_us)} a cycle.",
            price_us,
        )


def _ms(time_us: float) -> str:
    return f"{time_us / 1e3:.2f} ms"


def _mib(size_bytes: float) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"
