"""When copies in begin: beside what else is in use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.random_traces import traces
from tests.plan.traces import Program
from torch_lms.plan import DROP_UNCHANGED, RECOMPUTE, SWAP, Recipe, Trace, simulate
from torch_lms.plan.prefetch import place_in_turn, place_prefetches
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


@pytest.mark.parametrize("place", [place_prefetches, place_in_turn])
@given(trace=traces(most_ops=12, most_storages=7), seed=st.integers(0, 2**16), spare=st.integers(0, 60))
@settings(max_examples=300, deadline=None)
def test_what_comes_early_is_never_in_the_way_of_what_comes_first(
    place: Callable[[Problem, Choices], dict[int, int]], trace: Trace, seed: int, spare: int
) -> None:
    problem = Problem(trace, 0)
    choices = random_choices(problem, seed)
    limited = problem.under(int(problem.need(choices).max()) + spare)
    early = limited.decisions(choices, place(limited, choices))
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


def test_weights_that_are_streamed_come_one_after_the_other_without_a_pause() -> None:
    program = Program()
    weights = [program.lasting(40 * MIB) for _ in range(24)]
    for weight in weights:
        program.op("layer", 200, reads=[weight])
    problem = Problem(program.trace(), 12 * 40 * MIB)
    streamed = {number: DROP_UNCHANGED for number, one in enumerate(problem.candidates) if one.storage % 3 != 0}
    link_us = sum(problem.trace.link.in_us(problem.candidates[number].bytes) for number in streamed)
    assert link_us > 2 * problem.trace.plain_us

    def step_us(in_after: dict[int, int]) -> float:
        return simulate(problem.trace, problem.decisions(streamed, in_after), problem.limit_bytes).step_us

    assert step_us(place_prefetches(problem, streamed)) > 1.1 * link_us
    assert step_us(place_in_turn(problem, streamed)) <= 1.001 * link_us
