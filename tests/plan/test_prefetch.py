"""When copies in begin: beside what else is in use."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.random_traces import traces
from tests.plan.traces import Program
from torch_lms.plan import RECOMPUTE, SWAP, Recipe, Trace
from torch_lms.plan.prefetch import place_prefetches
from torch_lms.plan.problem import Choices, Problem
from torch_lms.plan.residency import steady_cycle

MIB = 2**20


def random_choices(problem: Problem, seed: int) -> Choices:
    random, found = Random(seed), Choices()
    for number, one in enumerate(problem.candidates):
        kinds = [kind for kind in (SWAP, RECOMPUTE) if (one.swappable if kind == SWAP else one.replay is not None)]
        if kinds and random.random() < 0.8:
            found[number] = problem.leave_kind(one) if (kind := random.choice(kinds)) == SWAP else kind
    return found


@given(trace=traces(most_ops=12, most_storages=7), seed=st.integers(0, 2**16), spare=st.integers(0, 60))
@settings(max_examples=300, deadline=None)
def test_what_comes_early_is_never_in_the_way_of_what_comes_first(trace: Trace, seed: int, spare: int) -> None:
    problem = Problem(trace, 0)
    choices = random_choices(problem, seed)
    limited = problem.under(int(problem.need(choices).max()) + spare)
    early = limited.decisions(choices, place_prefetches(limited, choices))
    assert max(steady_cycle(trace, early).memory_bytes) <= limited.limit_bytes


def test_a_replay_that_needs_much_comes_before_a_copy_that_would_be_in_its_way() -> None:
    program = Program()
    (again,) = program.op("again", 50, makes=[10 * MIB])
    (copied,) = program.op("copied", 50, makes=[40 * MIB], recipe=False)
    for _ in range(3):
        program.op("other", 50)
    program.op("use", 50, reads=[again, copied])
    program.release(again, copied)
    trace = program.trace()
    recipe = replace(trace.storages[again].recompute or Recipe(duration_us=0), working_bytes=60 * MIB)
    storages = (replace(trace.storages[again], recompute=recipe), trace.storages[copied])
    problem = Problem(replace(trace, storages=storages), 80 * MIB)
    numbers = {one.storage: number for number, one in enumerate(problem.candidates) if one.back_at == 5}
    choices = {numbers[again]: RECOMPUTE, numbers[copied]: SWAP}
    assert problem.need(choices)[5] == 70 * MIB
    assert place_prefetches(problem, choices) == {}
    roomy = problem.under(110 * MIB)
    assert place_prefetches(roomy, choices).keys() == {numbers[copied]}
