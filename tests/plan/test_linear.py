"""The linear program: no plan beats its bound, what it makes whole keeps the limit, and what it says is carried out."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.plan.random_traces import all_decisions, chained_traces, traces
from tests.plan.traces import Program
from torch_lms.plan import (
    RECOMPUTE,
    Decision,
    Host,
    Link,
    Trace,
    TraceOp,
    TraceStorage,
    make_plan,
    simulate,
)
from torch_lms.plan.linear import linear, linear_bound_us
from torch_lms.plan.methods import carry_through, linear_methods
from torch_lms.plan.problem import Problem
from torch_lms.plan.spent import reach

_MOST_COMBINATIONS = 400


def peak(trace: Trace) -> int:
    return simulate(trace, []).peak_bytes


def spent_of(problem: Problem) -> list[int]:
    """What recipes may find released, and can be dropped too."""
    found = set().union(*(reach(problem, number) for number in range(len(problem.candidates))))
    return sorted(one for one in found if problem.trace.storages[one].recompute is not None)


def some_decisions(problem: Problem, dropped: list[int]) -> list[list[Decision]]:
    """Decisions in which recipes hold what they need, in which they drop it, and in which they drop a part of it."""
    ways = [problem, problem.dropping([]), problem.dropping(spent_of(problem)), problem.dropping(dropped)]
    return [decisions for way in ways for decisions in islice(all_decisions(way), _MOST_COMBINATIONS)]


@given(
    trace=chained_traces(),
    share=st.floats(0, 0.99),
    swap=st.booleans(),
    random=st.randoms(use_true_random=False),
    host_us=st.sampled_from([0.0, 4.0, 30.0]),
)
@settings(max_examples=50, deadline=None)
def test_no_plan_beats_the_bound_whatever_its_recipes_hold(
    trace: Trace, share: float, swap: bool, random: Random, host_us: float
) -> None:
    if host_us:
        op_us = tuple(random.choice([host_us, 3 * host_us]) for _ in trace.ops)
        host = Host(op_us=op_us, waits=(0,), pageout_us=host_us, pagein_us=host_us, recompute_us=host_us)
        trace = replace(trace, host=host)
    problem = Problem(trace, 0, swap=swap)
    everything = some_decisions(problem, [one for one in spent_of(problem) if random.random() < 0.5])
    low = min(max(simulate(trace, decisions).planned_bytes) for decisions in everything)
    assume(low < peak(trace))
    limit = int(low + (peak(trace) - low) * share)
    found = [timeline for decisions in everything if (timeline := simulate(trace, decisions, limit)).feasible]
    bound_us = linear_bound_us(Problem(trace, limit, swap=swap))
    assert bound_us is not None
    assert bound_us <= min(timeline.step_us for timeline in found) + 1e-3


@given(trace=st.one_of(traces(), chained_traces()), share=st.floats(0.3, 0.99))
@settings(max_examples=100, deadline=None)
def test_what_it_makes_whole_is_carried_out_within_the_limit(trace: Trace, share: float) -> None:
    problem = Problem(trace, int(peak(trace) * share))
    for method in linear_methods(problem):
        timed = carry_through(problem, method)
        if timed is None or not timed.timeline.feasible:
            continue
        found = simulate(trace, timed.decisions, problem.limit_bytes)
        assert found.feasible
        assert found.peak_bytes <= problem.limit_bytes
        assert found.step_us == pytest.approx(timed.timeline.step_us)


@given(trace=chained_traces(), share=st.floats(0.3, 0.99))
@settings(max_examples=100, deadline=None)
def test_every_spent_input_of_what_is_dropped_is_held_or_dropped(trace: Trace, share: float) -> None:
    problem = Problem(trace, int(peak(trace) * share))
    found = linear(problem, chain_bytes=problem.limit_bytes)
    if found is None:
        return
    seen, choices = found
    made = {one.storage for one in seen.decisions(choices) if one.decision == RECOMPUTE}
    for number, kind in choices.items():
        replay = seen.candidates[number].replay
        if kind == RECOMPUTE and replay is not None:
            assert set(replay.direct) <= {*replay.held, *replay.dropped}
            assert set(replay.held).isdisjoint(replay.dropped)
            assert set(replay.dropped) <= made


def test_the_bound_lets_what_is_dropped_come_back_early() -> None:
    """Held to the last use of ``early``, its input takes more room than there is; so it comes back with ``next``."""
    program = Program()
    [far] = program.op("far", 5.0, makes=[60])
    [given_] = program.op("given", 900.0, makes=[100])
    [early] = program.op("early", 7.0, reads=[given_], makes=[50])
    [follows] = program.op("next", 3.0, reads=[early], makes=[10])
    program.op("needs room", 1.0, reads=[given_], other_bytes=60)
    program.release(given_)
    program.op("uses next", 1.0, reads=[follows])
    program.release(follows)
    program.op("needs more room", 1.0, other_bytes=100)
    program.op("uses early", 1.0, reads=[early])
    program.release(early)
    program.op("uses far", 1.0, reads=[far])
    program.release(far)
    trace = program.trace()
    problem = Problem(trace, 160, swap=False).dropping([])
    dropped = [number for number, one in enumerate(problem.candidates) if one.storage in (far, early, follows)]
    found = simulate(trace, problem.decisions(dict.fromkeys(dropped, RECOMPUTE)), 160)
    assert found.feasible
    assert found.step_us == pytest.approx(trace.plain_us + 5.0 + 7.0 + 3.0)
    assert linear_bound_us(problem) == pytest.approx(found.step_us)


def test_the_bound_counts_what_a_recipe_holds_until_the_next_use() -> None:
    """Making ``saved`` again gives no room while its larger input is held for it, so that input is made again, too."""
    program = Program()
    [large] = program.op("large", 40.0, makes=[100])
    [saved] = program.op("saved", 1.0, reads=[large], makes=[50])
    [follows] = program.op("next", 1.0, reads=[saved], makes=[1])
    program.op("last use of large", 1.0, reads=[large])
    program.release(large)
    program.op("uses next", 1.0, reads=[follows])
    program.release(follows)
    program.op("needs room", 1.0, other_bytes=160)
    program.op("uses saved", 1.0, reads=[saved])
    program.release(saved)
    trace = program.trace()
    bound_us = linear_bound_us(Problem(trace, 161, swap=False))
    assert bound_us is not None
    assert bound_us > trace.plain_us + 40.0
    assert bound_us <= make_plan(trace, 161, swap=False).predicted.step_us


def test_copies_hide_behind_what_the_device_waits_for_the_host() -> None:
    """A copy out and in of 50 us each; ops of 10 us, which the host submits every 60 us, or at once."""
    link = Link(out_bytes_per_us=1.0, in_bytes_per_us=1.0)
    ops = tuple(TraceOp(name=f"op{place}", phase="forward", duration_us=10.0) for place in range(6))
    away = TraceStorage(bytes=50, producer=0, uses=(5,))
    held = TraceStorage(bytes=50, producer=2, uses=(3,), released=3)
    quick = Trace(device="cuda:0", signature="0", link=link, ops=ops, storages=(away, held))
    slow = replace(quick, host=Host(op_us=(60.0,) * 6, waits=(5,)))
    assert Problem(quick, 60).elapsed_us.tolist() == [10.0] * 6
    assert Problem(slow, 60).elapsed_us.tolist() == [60.0] * 6
    predicted = [make_plan(trace, 60).predicted for trace in (quick, slow)]
    assert [one.step_us for one in predicted] == [140, 360]
    assert predicted[1].lower_bound_us == 360
