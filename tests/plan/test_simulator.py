"""The simulator against traces that were worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.random_traces import traces
from torch_lms.errors import PlanError
from torch_lms.plan import (
    DROP_UNCHANGED,
    HOST,
    RECOMPUTE,
    SWAP,
    Decision,
    Host,
    Link,
    Recipe,
    Trace,
    TraceOp,
    TraceStorage,
    simulate,
)
from torch_lms.plan.least import everything_away
from torch_lms.plan.problem import Problem
from torch_lms.plan.repair import time_choices

SLOW = Link(out_bytes_per_us=1.0, in_bytes_per_us=1.0)


def trace_of(durations: list[float], *storages: TraceStorage, link: Link = SLOW) -> Trace:
    ops = tuple(TraceOp(name=f"op{at}", phase="forward", duration_us=time) for at, time in enumerate(durations))
    return Trace(device="cpu", signature="0", link=link, ops=ops, storages=storages)


def made(place: int, size: int, *uses: int, recipe: Recipe | None = None, released: int | None = None) -> TraceStorage:
    return TraceStorage(bytes=size, producer=place, uses=uses, recompute=recipe, released=released)


# One storage of 20 bytes, made at 0 and used at 3; the link moves a byte a microsecond.
ONE = trace_of([10, 30, 30, 10], made(0, 20, 3, recipe=Recipe(duration_us=7)))


def swap(storage: int, out_after: int, in_after: int | None = None) -> Decision:
    return Decision(storage=storage, decision=SWAP, out_after=out_after, in_after=in_after)


def drop(storage: int, out_after: int) -> Decision:
    return Decision(storage=storage, decision=RECOMPUTE, out_after=out_after)


def test_without_decisions_ops_follow_each_other() -> None:
    found = simulate(ONE, [])
    assert found.step_us == 80
    assert found.memory_bytes == [20, 20, 20, 20]
    assert found.end_us == [10, 40, 70, 80]


def test_swap_on_demand_waits_for_its_copy_in() -> None:
    found = simulate(ONE, [swap(0, 0)])
    assert [(copy.direction, copy.start_us, copy.end_us) for copy in found.copies] == [("out", 10, 30), ("in", 70, 90)]
    assert found.memory_bytes == [20, 20, 0, 20]  # at place 1 the copy out still goes on
    assert found.planned_bytes == [20, 0, 0, 20]
    assert found.swapped_bytes == [0, 20, 20, 0]
    assert (found.step_us, found.waits_us, found.wait_of) == (100, 20, {0: 20})
    assert (found.out_bytes, found.in_bytes, found.host_peak_bytes) == (20, 20, 20)


def test_prefetched_swap_costs_no_time_but_memory() -> None:
    found = simulate(ONE, [swap(0, 0, 1)])
    assert [(copy.start_us, copy.end_us) for copy in found.copies] == [(10, 30), (40, 60)]
    assert found.planned_bytes == [20, 0, 20, 20]
    assert (found.step_us, found.waits_us) == (80, 0)


def test_copies_of_one_direction_follow_each_other() -> None:
    trace = trace_of([10, 10, 100, 10], made(0, 20, 3), made(1, 30, 3))
    found = simulate(trace, [swap(0, 0), swap(1, 1)])
    assert [(copy.start_us, copy.end_us) for copy in found.copies] == [(10, 30), (30, 60), (120, 140), (140, 170)]
    assert found.step_us == 180


def test_latency_is_part_of_each_copy() -> None:
    trace = trace_of([10, 30, 30, 10], made(0, 20, 3), link=Link(out_bytes_per_us=1, in_bytes_per_us=2, latency_us=3))
    found = simulate(trace, [swap(0, 0)])
    assert [(copy.start_us, copy.end_us) for copy in found.copies] == [(10, 33), (70, 83)]


@pytest.mark.parametrize(("share", "out_ends_us", "in_ends_us"), [(1.0, 80, 70), (0.5, 100, 90)])
def test_beside_each_other_both_directions_are_slower(share: float, out_ends_us: float, in_ends_us: float) -> None:
    link = Link(out_bytes_per_us=1, in_bytes_per_us=1, share_beside=share)
    trace = trace_of([10, 30, 10, 100, 10], made(0, 20, 4), made(2, 30, 4), link=link)
    found = simulate(trace, [swap(0, 0, 2), swap(1, 2, 3)])
    copies = [(copy.storage, copy.direction, copy.start_us, copy.end_us) for copy in found.copies]
    assert copies == [
        (0, "out", 10, 30),
        (1, "out", 50, out_ends_us),  # both go on from 50 until the copy in ends
        (0, "in", 50, in_ends_us),
        (1, "in", 150, 180),  # alone
    ]


def test_an_allocation_waits_for_copies_out() -> None:
    trace = trace_of([10, 30, 30, 10], made(0, 20, 3), made(1, 15, 1 + 1, released=2))
    found = simulate(trace, [swap(0, 0)], limit_bytes=20)
    assert found.start_us[1] == 30  # not 10: 20 and 15 bytes do not fit beside each other
    assert found.feasible
    assert found.peak_bytes == 20
    assert found.wait_of[0] == 40  # 20 for its copy out, 20 for its copy in
    assert found.step_us == 120


def test_a_copy_in_waits_for_the_room_that_its_place_has() -> None:
    trace = trace_of([10, 10, 10, 100, 10], made(0, 20, 4), made(1, 40, 4))
    found = simulate(trace, [swap(0, 0, 2), swap(1, 1)], limit_bytes=60)
    assert found.copies[0].direction == "out"
    assert (found.copies[0].start_us, found.copies[0].end_us) == (10, 30)
    back = next(copy for copy in found.copies if copy.direction == "in")
    assert back.start_us == found.end_us[2] == 30


def test_what_can_never_fit_is_told() -> None:
    found = simulate(ONE, [], limit_bytes=15)
    assert (found.feasible, found.excess_bytes) == (False, 5)


def test_a_drop_frees_at_once_and_its_replay_takes_compute() -> None:
    found = simulate(ONE, [drop(0, 0)])
    assert found.memory_bytes == [20, 0, 0, 20]
    assert found.dropped_bytes == [0, 20, 20, 0]
    assert (found.step_us, found.recompute_us, found.replay_us) == (87, 7, [0, 0, 0, 7])
    assert found.replayed == {3: [0]}
    assert not found.copies


def chain(*, released: int | None = None) -> Trace:
    """Storages 0, 1 and 2 of 10, 20 and 40 bytes, each made from the one before; 2 is used at the end."""
    return trace_of(
        [1, 1, 1, 10, 1],
        made(0, 10, 1, recipe=Recipe(duration_us=3), released=released),
        made(1, 20, 2, recipe=Recipe(duration_us=4, inputs=(0,)), released=released),
        made(2, 40, 4, recipe=Recipe(duration_us=5, inputs=(1,))),
    )


def test_a_chain_is_replayed_from_its_start() -> None:
    found = simulate(chain(), [drop(0, 1), drop(1, 2), drop(2, 2)])
    assert found.replayed[4] == [0, 1, 2]
    assert found.recompute_us == 12
    assert found.memory_bytes == [10, 30, 60, 0, 70]  # each stays once it is made again


def test_a_recipe_keeps_its_released_input() -> None:
    found = simulate(chain(released=2), [drop(2, 2)])
    assert found.memory_bytes == [10, 30, 70, 20, 60]  # 1 stays for the recipe of 2, 0 went at 2
    assert simulate(chain(released=2), []).memory_bytes == [10, 30, 70, 40, 40]


def test_released_inputs_may_be_dropped_and_go_one_by_one() -> None:
    found = simulate(chain(released=2), [drop(0, 1), drop(1, 2), drop(2, 2)])
    assert found.memory_bytes[3] == 0
    assert found.replayed[4] == [0, 1, 2]
    assert found.memory_bytes[4] == 60  # 0 is gone when 2 is made: 20 and 40


def test_a_swapped_input_comes_in_for_a_replay() -> None:
    found = simulate(chain(), [swap(1, 2), drop(2, 2)])
    assert found.waits_us == 30  # out until 23, in until 43, where place 4 could begin at 13
    assert found.recompute_us == 5
    assert [copy.storage for copy in found.copies] == [1, 1]


def test_what_a_recipe_keeps_outside_is_counted_until_the_return() -> None:
    kept = trace_of([1, 1, 1, 1], made(0, 10, 2, recipe=Recipe(duration_us=1, outside_bytes=4)))
    assert simulate(kept, [drop(0, 0)]).memory_bytes == [14, 4, 14, 10]
    assert simulate(kept, []).memory_bytes == [10, 10, 10, 10]


def test_a_replay_needs_its_ops_working_space() -> None:
    trace = trace_of([1, 1, 1, 1], made(0, 10, 2, recipe=Recipe(duration_us=1, working_bytes=30)))
    assert simulate(trace, [drop(0, 0)]).memory_bytes == [10, 0, 40, 10]
    assert simulate(trace, [drop(0, 0)], 39).feasible is False
    assert simulate(trace, []).memory_bytes == [10, 10, 10, 10]


def test_a_dropped_storage_comes_back_before_its_input_is_written() -> None:
    source = TraceStorage(bytes=8, recurring=True, uses=(0, 2), writes=(2,))
    trace = trace_of([1, 1, 1, 1, 1], source, made(0, 10, 4, recipe=Recipe(duration_us=6, inputs=(0,))))
    found = simulate(trace, [drop(1, 0)])
    assert found.replayed == {2: [1]}
    assert found.memory_bytes == [18, 8, 18, 18, 18]
    again = simulate(trace, [drop(1, 0), drop(1, 2)])
    assert again.replayed == found.replayed  # its recipe is no good after the write: it stays


def test_an_op_that_writes_its_own_input_has_no_recipe() -> None:
    source = TraceStorage(bytes=8, recurring=True, uses=(0,), writes=(0,))
    trace = trace_of([1, 1, 1], source, made(0, 10, 2, recipe=Recipe(duration_us=6, inputs=(0,))))
    assert simulate(trace, [drop(1, 0)]).memory_bytes == [18, 18, 18]


# Storage 1 is made at 0 and written at 1 and 3, last with what 0 is, which the program has released then.
REWRITTEN = trace_of(
    [1, 1, 1, 1, 5, 1],
    made(1, 4, 3, released=3),
    TraceStorage(
        bytes=10,
        producer=0,
        uses=(1, 3, 5),
        writes=(1, 3),
        recompute=Recipe(duration_us=6, inputs=(0,), rewrites=(1, 3)),
    ),
)


def test_what_is_written_in_place_is_dropped_after_the_last_write_of_its_recipe() -> None:
    assert REWRITTEN.storages[1].settled == 3
    found = simulate(REWRITTEN, [drop(1, 3)])
    assert found.memory_bytes == [10, 14, 14, 14, 4, 14]  # 0 stays for the recipe
    assert found.replayed[5] == [1]
    assert found.recompute_us == 6
    with pytest.raises(PlanError, match="expected a drop after place 3, where its recipe begins"):
        simulate(REWRITTEN, [drop(1, 1)])
    replays = {one.out_after: one.replay is not None for one in Problem(REWRITTEN, 0).candidates if one.storage == 1}
    assert replays == {1: False, 3: True}


def test_a_storage_may_be_dropped_twice() -> None:
    trace = trace_of([1, 5, 1, 5, 1], made(0, 10, 2, 4, recipe=Recipe(duration_us=2)))
    found = simulate(trace, [drop(0, 0), drop(0, 2)])
    assert found.memory_bytes == [10, 0, 10, 0, 10]
    assert found.recompute_us == 4


def test_a_lasting_storage_is_away_from_its_last_use_to_the_first_of_the_next_cycle() -> None:
    weight = TraceStorage(bytes=20, recurring=True, uses=(2,), writes=(2,))
    trace = trace_of([30, 30, 10, 30], weight)
    found = simulate(trace, [swap(0, 2, 0)])
    assert found.planned_bytes == [0, 20, 20, 0]
    assert found.step_us == 100
    late = simulate(trace, [swap(0, 2, 3)])  # begins at the end of the cycle before
    assert late.planned_bytes == [20, 20, 20, 0]
    assert late.step_us == 100


def test_a_link_that_is_always_busy_is_as_long_as_the_step() -> None:
    weight = TraceStorage(bytes=500, recurring=True, uses=(0,), writes=(0,))
    found = simulate(trace_of([10, 10], weight), [swap(0, 0)])
    assert found.step_us >= 500


def test_unchanged_storages_leave_without_a_copy() -> None:
    weight = TraceStorage(bytes=20, recurring=True, uses=(1,))
    found = simulate(trace_of([30, 10, 30], weight), [Decision(storage=0, decision=DROP_UNCHANGED, out_after=1)])
    assert (found.out_bytes, found.in_bytes) == (0, 20)
    assert found.planned_bytes == [0, 20, 0]
    assert found.host_peak_bytes == 20


def test_a_storage_served_from_the_host_never_comes_in() -> None:
    weight = TraceStorage(bytes=20, recurring=True, uses=(1,))
    found = simulate(trace_of([30, 10, 30], weight), [Decision(storage=0, decision=HOST, out_after=1)])
    assert found.memory_bytes == [0, 0, 0]
    assert found.served_us == [0, 20, 0]
    assert found.step_us == 90


def with_host(trace: Trace, op_us: list[float], **times: Any) -> Trace:
    return replace(trace, host=Host(op_us=tuple(op_us), **times))


def test_ops_that_are_shorter_than_their_submission_take_the_hosts_time() -> None:
    found = simulate(with_host(trace_of([10, 10, 10, 10]), [25, 25, 25, 25], waits=(3,)), [])
    assert found.step_us == found.host_us == 100
    assert found.start_us == [0, 25, 50, 75]
    assert found.late_us == [0, 0, 0, 0]  # each goes on until the host has submitted all of it
    assert found.waits_us == 0


def test_a_host_that_is_ahead_takes_no_time() -> None:
    trace = trace_of([50, 10, 10, 50])
    found = simulate(with_host(trace, [5, 25, 25, 5], waits=(3,)), [])
    assert found.start_us == simulate(trace, []).start_us
    assert found.step_us == 120


def test_after_some_ops_the_host_waits_for_the_device() -> None:
    trace = trace_of([50, 10, 10, 50])
    found = simulate(with_host(trace, [5, 25, 25, 5], waits=(0, 3)), [])
    assert found.end_us == [50, 75, 100, 150]
    assert found.host_us == 60


def test_the_host_is_ahead_across_cycles_unless_it_waits_at_the_end() -> None:
    trace = trace_of([10, 50], TraceStorage(bytes=20, recurring=True, uses=(0,), writes=(0,)))
    ahead = simulate(with_host(trace, [20, 5]), [])
    waits = simulate(with_host(trace, [20, 5], waits=(1,)), [])
    assert (ahead.step_us, waits.step_us) == (60, 70)


def test_each_action_takes_of_the_hosts_time() -> None:
    trace = with_host(ONE, [100, 100, 100, 100], waits=(3,), pageout_us=7, pagein_us=11, recompute_us=13)
    assert simulate(trace, []).step_us == 400
    dropped, swapped = simulate(trace, [drop(0, 0)]), simulate(trace, [swap(0, 0, 1)])
    assert dropped.host_us == dropped.step_us == 413
    assert swapped.host_us == swapped.step_us == 418
    unchanged = with_host(
        trace_of([10, 10], TraceStorage(bytes=20, recurring=True, uses=(1,))), [50, 50], pageout_us=7, pagein_us=11
    )
    found = simulate(unchanged, [Decision(storage=0, decision=DROP_UNCHANGED, out_after=1)])
    assert found.host_us == 111  # nothing is copied out


def test_memory_is_charged_when_the_host_asks_for_it() -> None:
    trace = trace_of([10, 30, 30, 10], made(0, 20, 3), made(2, 20, 3, released=3))
    assert simulate(trace, [swap(0, 0)]).memory_bytes == [20, 20, 20, 40]
    ahead = simulate(with_host(trace, [1, 1, 1, 1], waits=(3,)), [swap(0, 0)])
    assert ahead.memory_bytes == [20, 20, 40, 60]  # the copy out has not ended when the host gets there
    limited = simulate(with_host(trace, [1, 1, 1, 1], waits=(3,)), [swap(0, 0)], 40)
    assert limited.feasible
    assert limited.peak_bytes == 40
    assert limited.host_us == 4


@given(trace=traces(), op_us=st.floats(0, 50), cost_us=st.floats(0, 50))
@settings(max_examples=100, deadline=None)
def test_no_step_is_shorter_than_its_host_or_its_device_is_busy(trace: Trace, op_us: float, cost_us: float) -> None:
    decisions = time_choices(Problem(trace, 10**9), everything_away(Problem(trace, 10**9))).decisions
    times = {"pageout_us": cost_us, "pagein_us": cost_us, "recompute_us": cost_us}
    hosted, busy_us = with_host(trace, [op_us] * len(trace.ops), **times), sum(op.duration_us for op in trace.ops)
    found = simulate(hosted, decisions)
    assert found.step_us >= found.host_us >= op_us * len(trace.ops) - 1e-6
    assert found.step_us >= busy_us + found.recompute_us - 1e-6
    assert simulate(hosted, []).step_us >= simulate(trace, []).step_us - 1e-6  # with copies, these may begin earlier


@pytest.mark.parametrize(
    ("decision", "message"),
    [
        (swap(1, 0), "expected storages from 0 to 0, found 1"),
        (swap(0, 9), "expected a place from 0 to 3 as out_after"),
        (Decision(storage=0, decision=DROP_UNCHANGED, out_after=0), "expected a storage that lasts"),
    ],
)
def test_decisions_that_make_no_sense_are_refused(decision: Decision, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        simulate(ONE, [decision])


def test_storages_that_cannot_leave_are_refused() -> None:
    pinned = TraceStorage(bytes=1, producer=0, uses=(2,), movable=False, why_not_movable="it is pinned")
    with pytest.raises(PlanError, match="it is pinned; keep it"):
        simulate(trace_of([1, 1, 1], pinned), [swap(0, 0)])
    with pytest.raises(PlanError, match="expected a storage with a recipe"):
        simulate(trace_of([1, 1, 1], made(0, 1, 2)), [drop(0, 0)])


@given(trace=traces(), data=st.data())
@settings(max_examples=300, deadline=None)
def test_a_higher_limit_is_never_slower(trace: Trace, data: st.DataObject) -> None:
    problem = Problem(trace, 10**9)
    kinds = {
        number: [None] + [RECOMPUTE] * (one.replay is not None) + [problem.leave_kind(one)]
        for number, one in enumerate(problem.candidates)
    }
    drawn = {number: data.draw(st.sampled_from(mine)) for number, mine in kinds.items()}
    decisions = time_choices(problem, {number: kind for number, kind in drawn.items() if kind}).decisions
    limits = sorted(data.draw(st.lists(st.integers(1, 400), min_size=2, max_size=4)))
    # Where directions slow each other down, a copy that has to wait may be the faster for it.
    for share in (1.0, trace.link.share_beside):
        beside = replace(trace, link=replace(trace.link, share_beside=share))
        steps = [simulate(beside, decisions, limit).step_us for limit in [*limits, None]]
        assert all(one >= share * other - 1e-9 for one, other in pairwise(steps))
    free = simulate(trace, decisions)
    for limit in limits:
        found = simulate(trace, decisions, limit)
        assert found.feasible == (max(found.planned_bytes) <= limit)
        if found.feasible:
            assert found.peak_bytes <= limit
    assert free.step_us >= trace.plain_us + free.recompute_us - 1e-6


@given(trace=traces())
@settings(max_examples=200, deadline=None)
def test_plain_memory_is_that_of_the_storages_that_exist(trace: Trace) -> None:
    expected = [op.other_bytes for op in trace.ops]
    for storage in trace.storages:
        first = storage.producer or 0
        last = len(trace.ops) - 1 if storage.released is None else storage.released
        for place in range(first, last + 1):
            expected[place] += storage.bytes
    found = simulate(trace, [])
    assert found.memory_bytes == expected
    assert found.step_us == pytest.approx(trace.plain_us)
