"""From a trace and a limit to a plan: every method plans, the simulator judges, the fastest within the limit wins.

See Note [A host's speed] in `predict`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice

from torch_lms.errors import LimitError
from torch_lms.memory_sizes import in_gib
from torch_lms.plan.decision import KEEP, Decision
from torch_lms.plan.document import MethodResult, Plan
from torch_lms.plan.least import least_choices, least_limit, pressed, with_served
from torch_lms.plan.linear import linear_bound_us, scipy_is_there
from torch_lms.plan.methods import Method, carry_through, linear_methods, simple_methods
from torch_lms.plan.predict import drawn, judged_us, predicted_of, timed_within
from torch_lms.plan.problem import Choices, Problem
from torch_lms.plan.reasons import explain_decisions
from torch_lms.plan.repair import Timed, host_fits, take_back, time_choices
from torch_lms.plan.simulator import simulate
from torch_lms.plan.trace import Trace

__all__ = ["Planner", "make_plan"]

_PRESSED = "pressed"


def make_plan(
    trace: Trace,
    limit_bytes: int,
    host_limit_bytes: int | None = None,
    swap: bool = True,
    recompute: bool = True,
    others: Sequence[Plan] = (),
    simply: bool = False,
) -> Plan:
    """Decides for every storage of a cycle whether it is kept, swapped or made again.

    Args:
        trace: of the program.
        limit_bytes: of the device's memory.
        host_limit_bytes: of the host's memory for swapped storages; None for no limit.
        swap: whether storages may leave by a copy.
        recompute: whether they may be dropped and made again.
        others: plans of the same cycle, for instance for lower limits; the new plan is never worse than one of them
            that keeps the limit: slower, or where the host's times are known, by Note [A host's speed].
        simply: whether no plan is made by the linear program, which takes most of the time; it still gives the bound.

    Raises:
        LimitError: if no plan keeps the limit; it states `least_limit`.
    """
    planner = Planner(trace, limit_bytes, host_limit_bytes=host_limit_bytes, swap=swap, recompute=recompute)
    return planner.bounded(planner.plan(others=others, simply=simply))


class Planner:
    """Plans one trace under one limit, as often as it is asked: what one plan has found, the next one knows.

    The arguments are those of `make_plan`.
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
        self._trace, self._limit_bytes, self._host_limit_bytes = trace, limit_bytes, host_limit_bytes
        self._swap, self._recompute = swap, recompute
        self._plannings: list[_Planning] = []  # those that were tried
        self._winner: _Planning | None = None

    def plan(self, *, others: Sequence[Plan] = (), simply: bool = False, only: str = "") -> Plan:
        """The best plan, with no other bound than the program's own time.

        Args:
            others: see `make_plan`.
            simply: likewise.
            only: the name of a method to plan by; empty for all.

        Raises:
            LimitError: if no plan keeps the limit, or none of that method's.
        """
        for planning in self._ways():
            best = planning.best(others, simply, only)
            if best is not None:
                self._winner = planning
                return planning.plan(*best)
        least, host, raised = self.least_bytes, "", "the limit"
        if self._host_limit_bytes is not None:
            host, raised = f" with {self._host_limit_bytes} bytes of host memory", "this limit or the host's"
        raise LimitError(
            f"expected a limit of at least {least} bytes ({in_gib(least)}){host}, found {self._limit_bytes}: no "
            f"plan was found that needs less; raise {raised}, or make the program's largest ops smaller"
        )

    @cached_property
    def least_bytes(self) -> int:
        """The least limit, in bytes, for which there is a plan; see `least_limit`."""
        return least_limit(
            self._trace, host_limit_bytes=self._host_limit_bytes, swap=self._swap, recompute=self._recompute
        )

    def bounded(self, plan: Plan) -> Plan:
        """A plan of this trace and limit with the linear program's bound, which takes time to find."""
        planning = self._winner or next(self._ways())
        bound_us = min(planning.bound_us, plan.predicted.step_us)
        return replace(plan, predicted=replace(plan.predicted, lower_bound_us=bound_us))

    def judged_us(self, plan: Plan) -> float:
        """What its plans are compared by."""
        return judged_us(self._trace, plan.decisions, self._limit_bytes, plan.predicted.step_us)

    def _ways(self) -> Iterator[_Planning]:
        yield from self._plannings
        problem = Problem(
            self._trace,
            self._limit_bytes,
            host_limit_bytes=self._host_limit_bytes,
            swap=self._swap,
            recompute=self._recompute,
        )
        for given, whole in islice(_parts_and_wholes(problem), len(self._plannings), None):
            self._plannings.append(_Planning(given, whole))
            yield self._plannings[-1]


def _parts_and_wholes(problem: Problem) -> Iterator[tuple[Problem, Problem | None]]:
    """The arguments of a `_Planning`, one after the other.

    With few storages on the host; then with all that can be there, as for the least limit. A copy in that the next
    cycle needs is in no simulation: at first without what asks for one.
    """
    few = with_served(problem)
    if problem.swap and problem.trace.handed_on:
        yield few.handing_on(), few
    yield few, None
    if problem.swap:
        yield with_served(problem.under(0)).under(problem.limit_bytes), None


class _Planning:
    """What is known of one problem: what each method has come to.

    Args:
        problem: to be planned.
        whole: the problem of which it is a part, and which comes next if the usual methods do not keep the limit.
    """

    def __init__(self, problem: Problem, whole: Problem | None = None) -> None:
        self.problem, self._whole = problem, whole
        self.plain = simulate(problem.trace, [])
        self._carried_through: dict[str, Timed | None] = {}  # by method
        self.results: list[MethodResult] = []

    @cached_property
    def bound_us(self) -> float:
        """No plan is faster."""
        fits = self.plain.peak_bytes <= self.problem.limit_bytes
        bound_us = linear_bound_us(self._whole or self.problem) if scipy_is_there() and not fits else None
        return max(bound_us or 0.0, self.plain.step_us)

    def best(self, others: Sequence[Plan], simply: bool, only: str) -> tuple[str, Timed] | None:
        """The winner's name and what it chose; None if nothing keeps the limit."""
        self.results = []
        if self.plain.peak_bytes <= self.problem.limit_bytes:
            return "keep", Timed({}, [], self.plain)
        found = [*self._by_methods(simply, only), *self._by_others(others)]
        best = min((one for one in found if self._keeps(one[1])), key=lambda one: self._judged(one[1]), default=None)
        return best or (self._pressed() if self._whole is None and only in ("", _PRESSED) else None)

    def _judged(self, timed: Timed) -> tuple[float, int]:
        """The least is the best."""
        timeline, problem = timed.timeline, self.problem
        took_us = judged_us(problem.trace, timed.decisions, problem.limit_bytes, timeline.step_us)
        return took_us, timeline.out_bytes + timeline.in_bytes

    def _by_methods(self, simply: bool, only: str) -> Iterator[tuple[str, Timed]]:
        def asked(methods: Sequence[Method]) -> list[Method]:
            return [one for one in methods if only in ("", one.name)]

        yield from self._carried(asked(simple_methods(self.problem)))
        if self._whole is None and all(result.step_us is None for result in self.results):
            tried = {result.name for result in self.results}
            more = asked(simple_methods(self.problem, all_of_them=True))
            yield from self._carried([method for method in more if method.name not in tried])
        solvable = scipy_is_there()
        if simply or not solvable:
            why = "SciPy is not installed" if not solvable else "it takes longer"
            self.results.append(MethodResult(name="linear", step_us=None, note=f"left out: {why}"))
            return
        yield from self._carried(asked(linear_methods(self.problem)))

    def _carried(self, methods: Sequence[Method]) -> Iterator[tuple[str, Timed]]:
        for method in methods:
            if method.name not in self._carried_through:
                self._carried_through[method.name] = carry_through(self.problem, method)
            timed = self._carried_through[method.name]
            if timed is None:
                note = "fractions keep no such limit"
                self.results.append(MethodResult(name=method.name, step_us=None, note=note))
            else:
                self._note(method.name, timed)
                yield method.name, timed

    def _by_others(self, others: Sequence[Plan]) -> Iterator[tuple[str, Timed]]:
        trace = self.problem.trace
        for plan in others:
            if plan.signature != trace.signature or len(plan.ops) != len(trace.ops):
                continue
            decisions = _leaving(plan.decisions)
            timed = Timed({}, decisions, simulate(trace, decisions, self.problem.limit_bytes))
            self._note("given", timed)
            yield "given", timed

    def _pressed(self) -> tuple[str, Timed] | None:
        """What is left if the methods keep no limit: nearly everything leaves."""
        best: tuple[str, Timed] | None = None
        if self.problem.swap:
            best = self._pressed_by(pressed(self.problem), best)
        if best is None:
            for choices in least_choices(self.problem):
                best = self._pressed_by(choices, best)
        if best is not None:
            self._note(*best)
        return best

    def _pressed_by(self, choices: Choices, best: tuple[str, Timed] | None) -> tuple[str, Timed] | None:
        if self.problem.excess(choices).any() or not host_fits(self.problem, choices):
            return best
        timed = time_choices(self.problem, take_back(self.problem, choices))
        better = self._keeps(timed) and (best is None or timed.better_than(best[1]))
        return (_PRESSED, timed) if better else best

    def _keeps(self, timed: Timed) -> bool:
        host = self.problem.host_limit_bytes
        return timed.timeline.feasible and (host is None or timed.timeline.host_peak_bytes <= host)

    def _note(self, name: str, timed: Timed) -> None:
        note, step_us = "", timed.timeline.step_us
        if not timed.timeline.feasible:
            note = f"exceeds the limit by {timed.timeline.excess_bytes} bytes"
        elif not self._keeps(timed):
            note = f"needs {timed.timeline.host_peak_bytes} bytes of host memory"
        self.results.append(MethodResult(name=name, step_us=None if note else step_us, note=note))

    def plan(self, method: str, timed: Timed) -> Plan:
        """The document."""
        trace, leaving = self.problem.trace, _leaving(timed.decisions)
        found = timed_within(trace, leaving, self.problem.limit_bytes)
        return Plan(
            signature=trace.signature,
            device=trace.device,
            limit_bytes=self.problem.limit_bytes,
            predicted=predicted_of(found, self.plain, trace.plain_us),
            method=method,
            methods=tuple(self.results),
            decisions=tuple(explain_decisions(self.problem, leaving, found)),
            ops=trace.ops,
            recurring=tuple(storage.recurring for storage in trace.storages),
            timeline=drawn(found, self.plain),
        )


def _leaving(decisions: Sequence[Decision]) -> list[Decision]:
    return [one for one in decisions if one.decision != KEEP]
