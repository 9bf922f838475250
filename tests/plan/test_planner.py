"""Plans: against everything that could be decided, against the bound, and what is promised of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import islice, pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.plan.large_traces import encoder_decoder_trace, experts_trace
from tests.plan.random_traces import all_decisions, traces
from tests.plan.traces import Program, gpt_trace
from torch_lms.errors import LimitError
from torch_lms.plan import (
    DROP_UNCHANGED,
    HOST,
    KEEP,
    RECOMPUTE,
    SWAP,
    Plan,
    Timeline,
    Trace,
    least_limit,
    make_plan,
    simulate,
)
from torch_lms.plan import linear as linear_module
from torch_lms.plan.anchors import find_anchors
from torch_lms.plan.linear import linear_bound_us
from torch_lms.plan.methods import carry_through, linear_methods
from torch_lms.plan.problem import Problem
from torch_lms.plan.repair import fit

MIB = 2**20
_MOST_COMBINATIONS = 1500
SMALL_GPT = gpt_trace(layers=4, width=512, tokens=4096, vocabulary=4000)


def carried_out(trace: Trace, plan: Plan) -> Timeline:
    return simulate(trace, plan.decisions, plan.limit_bytes)


def kinds(plan: Plan) -> set[str]:
    return {one.decision for one in plan.decisions}


def peak(trace: Trace) -> int:
    return simulate(trace, []).peak_bytes


@given(trace=traces(most_ops=7, most_storages=3), share=st.floats(0, 0.99))
@settings(max_examples=60, deadline=None)
def test_plans_are_near_the_best_of_all_decisions(trace: Trace, share: float) -> None:
    everything = list(islice(all_decisions(Problem(trace, 0)), _MOST_COMBINATIONS + 1))
    assume(len(everything) <= _MOST_COMBINATIONS)
    low = min(max(simulate(trace, decisions).planned_bytes) for decisions in everything)
    assume(low < peak(trace))
    limit = int(low + (peak(trace) - low) * share)
    possible = [found for decisions in everything if (found := simulate(trace, decisions, limit)).feasible]
    best_us = min(found.step_us for found in possible)
    plan = make_plan(trace, limit)
    assert carried_out(trace, plan).feasible
    assert plan.predicted.step_us <= 1.5 * best_us + 1e-6
    bound_us = linear_bound_us(Problem(trace, limit))
    assert bound_us is not None
    assert bound_us <= best_us + 1e-6


@given(trace=traces(), share=st.floats(0, 1.2), swap=st.booleans(), recompute=st.booleans())
@settings(max_examples=150, deadline=None)
def test_a_plan_keeps_its_limit_down_to_the_least(trace: Trace, share: float, swap: bool, recompute: bool) -> None:
    limit = int(peak(trace) * share)
    least = least_limit(trace, swap=swap, recompute=recompute)
    assert least <= peak(trace)
    # By recompute alone it is the least for which a plan has been found; less may do.
    too_little = least - 1 if swap or not recompute else 0
    with pytest.raises(LimitError, match=f"expected a limit of at least {least} bytes"):
        make_plan(trace, too_little, swap=swap, recompute=recompute)
    plan = make_plan(trace, max(least, limit), swap=swap, recompute=recompute)
    found = carried_out(trace, plan)
    assert found.feasible
    assert found.peak_bytes == plan.predicted.peak_bytes <= plan.limit_bytes
    assert found.step_us == pytest.approx(plan.predicted.step_us)
    assert plan.predicted.lower_bound_us <= found.step_us + 1e-6
    if not swap:
        assert kinds(plan) <= {KEEP, RECOMPUTE}
    if not recompute:
        assert RECOMPUTE not in kinds(plan)


@given(trace=traces(), shares=st.lists(st.floats(0.2, 1.1), min_size=2, max_size=4))
@settings(max_examples=60, deadline=None)
def test_a_higher_limit_is_never_slower_beside_the_plans_for_lower_ones(trace: Trace, shares: list[float]) -> None:
    made: list[Plan] = []
    least = least_limit(trace)
    for share in sorted(shares):
        made.append(make_plan(trace, max(least, int(peak(trace) * share)), others=made))
    steps = [plan.predicted.step_us for plan in made]
    assert all(one >= other - 1e-9 for one, other in pairwise(steps))


def test_what_has_no_room_to_be_made_again_is_copied() -> None:
    program = Program()
    (read,) = program.op("make", 50, makes=[40 * MIB], recipe=False)
    (kept,) = program.op("large", 50, reads=[read], makes=[60 * MIB])
    (other,) = program.op("other", 50, makes=[100 * MIB], recipe=False)
    program.op("use", 50, reads=[kept, other])
    program.release(kept, other)
    program.op("use", 50, reads=[read])
    program.release(read)
    problem = Problem(program.trace(), 170 * MIB)
    numbers = {(one.storage, one.back_at): number for number, one in enumerate(problem.candidates)}
    choices = {numbers[read, 4]: SWAP, numbers[kept, 3]: RECOMPUTE}
    assert problem.excess(choices)[3] == 30 * MIB  # what it is made from has to be there, too
    assert fit(problem, choices, copying=True) == {numbers[read, 4]: SWAP, numbers[kept, 3]: SWAP}
    assert fit(problem.under(200 * MIB), choices, copying=True) == choices == fit(problem, choices)


@pytest.mark.parametrize(("uses", "leaving"), [(True, "master"), (False, "gradient")])
def test_what_the_next_cycle_uses_does_not_leave_at_the_end(*, uses: bool, leaving: str) -> None:
    program = Program()
    master, old = program.lasting(40 * MIB), program.lasting(40 * MIB)
    program.op("norm", 2000, reads=[old] if uses else [])
    program.release(old)
    program.op("update", 2000, writes=[master])
    (gradient,) = program.op("backward", 2000, makes=[40 * MIB], recipe=False)
    program.op("long", 9000)
    (large,) = program.op("large", 2000, makes=[30 * MIB], recipe=False)
    program.release(large)
    trace = program.trace()
    plan = make_plan(trace, 80 * MIB)
    named = {master: "master", gradient: "gradient"}
    assert {named[one.storage] for one in plan.decisions if one.decision == SWAP} == {leaving}
    tight = make_plan(trace, 60 * MIB)  # there is no other way
    assert {named[one.storage] for one in tight.decisions if one.decision == SWAP} == {"master", "gradient"}


@pytest.mark.parametrize("share", [0.8, 0.5, 0.3])
def test_gpt_is_planned_close_to_the_bound(share: float) -> None:
    plan = make_plan(SMALL_GPT, int(peak(SMALL_GPT) * share))
    assert carried_out(SMALL_GPT, plan).feasible
    assert plan.predicted.step_us <= 1.05 * plan.predicted.lower_bound_us
    assert {SWAP, RECOMPUTE} & kinds(plan)
    assert plan.predicted.recompute_us <= 0.3 * plan.predicted.plain_us


def test_what_fits_is_left_alone() -> None:
    plan = make_plan(SMALL_GPT, peak(SMALL_GPT))
    assert kinds(plan) == {KEEP}
    assert (plan.method, plan.methods, plan.actions()) == ("keep", (), {})
    assert plan.predicted.step_us == plan.predicted.plain_us
    assert plan.decisions[0].reason.startswith("Everything fits: the peak is ")


def test_what_lives_on_after_its_last_use_is_served_where_nothing_else_makes_room() -> None:
    program = Program()
    [kept] = program.op("first", 10.0, makes=[80], recipe=False)
    program.op("reads", 10.0, reads=[kept], recipe=False)
    [made] = program.op("last", 10.0, makes=[80], recipe=False)
    program.release(made)
    program.drafts[kept].recurring = True
    trace = program.trace()
    assert least_limit(trace) == 80
    for limit in (80, 120, 159):
        plan = make_plan(trace, limit)
        assert kinds(plan) == {KEEP, HOST}
        assert carried_out(trace, plan).feasible


@pytest.mark.parametrize("share", [0.6, 0.4])
@pytest.mark.parametrize("make", [experts_trace, encoder_decoder_trace], ids=["experts", "encoder and decoder"])
def test_thousands_of_small_storages_are_planned_close_to_the_bound(make: Callable[[], Trace], share: float) -> None:
    trace = make()
    assert len(trace.storages) > 4000
    problem = Problem(trace, int(peak(trace) * share))
    bound_us = linear_bound_us(problem)
    assert bound_us is not None
    assert bound_us > 1.01 * trace.plain_us
    [method] = linear_methods(problem)
    by_program, plan = carry_through(problem, method), make_plan(trace, problem.limit_bytes, simply=True)
    assert by_program is not None
    assert by_program.timeline.feasible
    assert by_program.timeline.step_us <= 1.02 * bound_us
    assert plan.predicted.lower_bound_us == pytest.approx(bound_us)
    assert plan.predicted.step_us <= 1.03 * bound_us


def test_each_way_alone_makes_plans() -> None:
    limit = int(peak(SMALL_GPT) * 0.6)
    both = make_plan(SMALL_GPT, limit)
    swapped = make_plan(SMALL_GPT, limit, recompute=False)
    again = make_plan(SMALL_GPT, limit, swap=False)
    assert kinds(swapped) <= {KEEP, SWAP, DROP_UNCHANGED}
    assert kinds(again) == {KEEP, RECOMPUTE}
    assert again.predicted.out_bytes == again.predicted.in_bytes == 0
    assert both.predicted.step_us <= min(swapped.predicted.step_us, again.predicted.step_us) * 1.001


def test_the_host_limit_is_kept() -> None:
    limit = int(peak(SMALL_GPT) * 0.4)
    free = make_plan(SMALL_GPT, limit)
    host = free.predicted.host_peak_bytes // 3
    assert host > 0
    plan = make_plan(SMALL_GPT, limit, host_limit_bytes=host)
    assert plan.predicted.host_peak_bytes <= host
    assert carried_out(SMALL_GPT, plan).feasible
    with pytest.raises(LimitError, match=r"with 0 bytes of host memory, found 1:"):
        make_plan(SMALL_GPT, 1, host_limit_bytes=0)
    assert least_limit(SMALL_GPT, host_limit_bytes=0) > least_limit(SMALL_GPT)


def test_an_op_that_needs_more_than_fits_reads_from_the_host() -> None:
    program = Program()
    weights = [program.lasting(40 * MIB) for _ in range(3)]
    program.op("fused", 100.0, reads=weights[:1], writes=weights)
    program.op("other", 100.0)
    plan = make_plan(program.trace(), 90 * MIB)
    [served] = [one for one in plan.decisions if one.decision == HOST]
    assert "needs more than 0.09 GiB at once" in served.reason
    assert served.price_us > 0
    assert carried_out(program.trace(), plan).peak_bytes <= 90 * MIB
    with pytest.raises(LimitError):
        make_plan(program.trace(), 90 * MIB, swap=False)


def test_what_is_made_from_what_an_op_reads_from_the_host_is_not_made_again() -> None:
    program = Program()
    program.phase = "forward"
    images = program.lasting(60 * MIB)
    [narrow] = program.op("cast", 1.0, reads=[images], makes=[30 * MIB])
    [found] = program.op("first", 10.0, reads=[narrow], makes=[5 * MIB])
    [large] = program.op("large", 10.0, reads=[found], makes=[65 * MIB])
    program.release(large)
    program.op("backward", 10.0, reads=[narrow, found])
    trace = program.trace()
    plan = make_plan(trace, 75 * MIB)
    decided = {one.storage: one.decision for one in plan.decisions}
    assert (decided[images], decided[narrow]) == (HOST, SWAP)
    assert carried_out(trace, plan).feasible


def test_unchanged_weights_are_not_copied_out() -> None:
    program = Program()
    program.phase = "forward"
    weights = [program.lasting(64 * MIB) for _ in range(8)]
    for weight in weights:
        program.op("aten::linear", 5000.0, reads=[weight])
    plan = make_plan(program.trace(), 256 * MIB)
    assert any(one.decision == DROP_UNCHANGED for one in plan.decisions)
    assert plan.predicted.out_bytes == 0
    assert plan.predicted.step_us == pytest.approx(plan.predicted.plain_us, rel=0.02)


def test_a_released_input_is_dropped_with_what_is_made_from_it() -> None:
    program = Program()
    kept = []
    [x] = program.op("aten::embedding", 50.0, makes=[8 * MIB], recipe=False)
    for _ in range(6):
        [branch] = program.op("aten::addmm", 200.0, reads=[x], makes=[64 * MIB])
        [y] = program.op("aten::add", 100.0, reads=[branch], makes=[64 * MIB])
        program.release(branch)
        kept.append(y)
    program.phase = "backward"
    for y in reversed(kept):
        program.op("aten::backward", 300.0, reads=[y])
        program.release(y)
    trace = program.trace()
    plan = make_plan(trace, 250 * MIB, swap=False)
    dropped = {one.storage for one in plan.decisions if one.decision == RECOMPUTE}
    spent = {one for one in dropped if trace.op_of(one) == "aten::addmm"}
    assert spent
    assert any("Only recipes need it again" in one.reason for one in plan.decisions if one.storage in spent)


def test_anchors_cut_long_chains() -> None:
    program = Program()
    [x] = program.op("first", 10.0, makes=[10 * MIB], recipe=False)
    line = [x]
    for _ in range(20):
        line += program.op("aten::relu", 10.0, reads=[line[-1]], makes=[10 * MIB])
    program.phase = "backward"
    for one in reversed(line):
        program.op("aten::backward", 10.0, reads=[one])
        program.release(one)
    problem = Problem(program.trace(), 60 * MIB)
    assert find_anchors(problem, 1000 * MIB) == frozenset()
    few, many = find_anchors(problem, 50 * MIB), find_anchors(problem, 20 * MIB)
    assert 0 < len(few) < len(many) < 20
    plan = make_plan(program.trace(), 80 * MIB, swap=False)
    assert plan.predicted.recompute_us <= 2 * 10.0 * 20


def test_without_scipy_the_other_methods_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "find_spec", lambda name: None)
    plan = make_plan(SMALL_GPT, int(peak(SMALL_GPT) * 0.5))
    left_out = [one for one in plan.methods if one.name == "linear"]
    assert [one.note for one in left_out] == ["left out: SciPy is not installed"]
    assert plan.predicted.lower_bound_us == pytest.approx(plan.predicted.plain_us)
    assert carried_out(SMALL_GPT, plan).feasible


def test_given_plans_of_other_programs_are_left_out() -> None:
    other = gpt_trace(layers=3, width=512, tokens=4096, vocabulary=4000)
    plan = make_plan(SMALL_GPT, int(peak(SMALL_GPT) * 0.5), others=[make_plan(other, int(peak(other) * 0.5))])
    assert "given" not in {one.name for one in plan.methods}


def test_a_plan_is_the_same_each_time() -> None:
    limit = int(peak(SMALL_GPT) * 0.4)
    assert make_plan(SMALL_GPT, limit).to_json() == make_plan(SMALL_GPT, limit).to_json()


def test_planning_needs_no_torch() -> None:
    import subprocess

    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from tests.plan.traces import gpt_trace\n"
        "from torch_lms.plan import make_plan\n"
        "trace = gpt_trace(layers=1, width=64, tokens=256, vocabulary=100)\n"
        "print(make_plan(trace, 3_000_000).method)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env={"PYTHONPATH": "python:."}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
