"""Transfers on one queue of each rank, as NCCL has it: under every schedule, whatever its actions take."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_lms.schedules.actions import Action, Schedule
from torch_lms.schedules.rules import ONE_STAGE_EACH, SCHEDULES, make_schedule
from torch_lms.schedules.simulation import ends_of, simulate, tasks_of
from torch_lms.schedules.traffic import Transfer, expected_us, in_turn, traffic_of

Times = Mapping[Action, float]


class Run:
    """A schedule on devices that do their actions in order, and on one queue each.

    An action begins when the one before it is over and what it needs has come. A transfer begins when the transfer and
    the action before it are over on both of its ranks, and takes no time: it stands under the action that made it.
    """

    def __init__(self, schedule: Schedule, planned: Times, taken: Times) -> None:
        self.after: dict[Hashable, set[Hashable]] = {}
        self.taken = taken
        self.traffic = [traffic_of(schedule, rank, planned.__getitem__) for rank in range(len(schedule.ranks))]
        for actions, traffic in zip(schedule.ranks, self.traffic, strict=True):
            self._give(actions, traffic.transfers)
        self.ends: dict[Hashable, float] = {}
        while ready := [one for one in self.after if one not in self.ends and self.after[one] <= self.ends.keys()]:
            for one in ready:
                begin = max((self.ends[before] for before in self.after[one]), default=0.0)
                self.ends[one] = begin + (self.taken[one] if isinstance(one, Action) else 0.0)

    def _give(self, actions: Sequence[Action], transfers: Sequence[Transfer]) -> None:
        for before, action in zip((None, *actions), actions, strict=False):
            self.after.setdefault(action, set()).update({before} - {None})
        queued: Hashable = None
        for one in transfers:
            name: Hashable = "transfer", one.made_by
            self.after.setdefault(name, set()).update({queued} - {None})
            queued = name
            if one.place:
                self.after[name].add(actions[one.place - 1])
            if one.receives:
                self.after.setdefault(one.used_by, set()).add(name)
            else:
                assert one.made_by in actions[: one.place]


def draw_schedule(data: st.DataObject) -> Schedule:
    name = data.draw(st.sampled_from(SCHEDULES))
    ranks = data.draw(st.integers(1, 4))
    stages = ranks * (1 if name in ONE_STAGE_EACH else data.draw(st.integers(1, 2)))
    return make_schedule(name, ranks=ranks, stages=stages, microbatches=ranks * data.draw(st.integers(1, 3)))


def draw_times(data: st.DataObject, schedule: Schedule) -> Times:
    return {action: data.draw(st.sampled_from([0.5, 1.0, 1.5, 2.0, 7.0])) for _, action in schedule}


@given(data=st.data())
def test_no_queue_stops_whatever_a_partition_has_predicted(data: st.DataObject) -> None:
    schedule = draw_schedule(data)
    strange = st.sampled_from([-1.0, 0.0, 1e-300, 1e-6, 1.0, 1e9, 3e15, math.inf, math.nan])
    run = Run(schedule, {action: data.draw(strange) for _, action in schedule}, draw_times(data, schedule))
    assert run.ends.keys() == run.after.keys()


@given(data=st.data())
def test_no_queue_stops(data: st.DataObject) -> None:
    """All runs end, and none is sooner over than without queues."""
    schedule = draw_schedule(data)
    planned, taken = draw_times(data, schedule), draw_times(data, schedule)
    run = Run(schedule, planned, taken)
    assert run.ends.keys() == run.after.keys()
    for event in simulate(schedule, taken.__getitem__):
        assert run.ends[event.action] >= event.end_us - 1e-9


@pytest.mark.parametrize("name", SCHEDULES)
def test_queues_hold_up_nothing_where_stages_take_what_is_expected(name: str) -> None:
    stages = 4 if name in ONE_STAGE_EACH else 8
    schedule = make_schedule(name, ranks=4, stages=stages, microbatches=8)
    times = {action: expected_us()(action) for _, action in schedule}
    run = Run(schedule, times, times)
    ideal = max(event.end_us for event in simulate(schedule, times.__getitem__))
    assert max(run.ends.values()) == pytest.approx(ideal, rel=0.02)  # the first stage's backward of inputs takes none


@given(data=st.data())
def test_what_an_action_lets_go_of_has_been_received(data: st.DataObject) -> None:
    schedule = draw_schedule(data)
    run = Run(schedule, draw_times(data, schedule), draw_times(data, schedule))
    for actions, traffic in zip(schedule.ranks, run.traffic, strict=True):
        sent = {one.made_by for one in traffic.transfers if not one.receives}
        gone = [done for action in actions for done in traffic.ended[action]]
        assert len(gone) == len(set(gone))
        assert set(gone) <= sent
        for action in actions:
            begin = run.ends[action] - run.taken[action]
            for done in traffic.ended[action]:
                assert run.ends["transfer", done] <= begin + 1e-9


def test_room_is_asked_for_no_sooner_than_it_is_needed() -> None:
    """Under 1F1B a rank never has more on its way in than one activation and one gradient."""
    schedule = make_schedule("1f1b", ranks=4, stages=4, microbatches=8)
    for rank, actions in enumerate(schedule.ranks):
        transfers = [one for one in traffic_of(schedule, rank, expected_us()).transfers if one.receives]
        for place, action in enumerate(actions):
            asked = [one for one in transfers if one.place <= place and one.used_by in actions[place:]]
            assert len(asked) <= 2, action
            for kinds in ("F", "BI"):
                assert sum(one.used_by.kind in kinds for one in asked) <= 1 + (rank == 0)


def test_actions_are_expected_to_take_what_their_stages_take() -> None:
    duration_us = expected_us(((10.0, 20.0), (30.0, 50.0), (30.0, 20.0)))
    assert [duration_us(Action(0, kind, 0)) for kind in "FBIW"] == [10.0, 30.0, 0.0, 30.0]
    assert [duration_us(Action(1, kind, 0)) for kind in "FBIW"] == [20.0, 50.0, 30.0, 20.0]
    assert [expected_us()(Action(0, kind, 0)) for kind in "FBIW"] == [1.0, 2.0, 0.0, 2.0]
    assert [expected_us()(Action(1, kind, 0)) for kind in "FBIW"] == [1.0, 2.0, 1.0, 1.0]


@given(data=st.data())
def test_tasks_in_turn_are_those_of_the_queues(data: st.DataObject) -> None:
    schedule = draw_schedule(data)
    planned, taken = draw_times(data, schedule), draw_times(data, schedule)
    tasks = in_turn(tasks_of(schedule), planned.__getitem__)
    assert all(one < number for number, task in enumerate(tasks) for one in task.needs)
    run = Run(schedule, planned, taken)
    for task, end in zip(tasks, ends_of(tasks, taken.__getitem__, lambda action: 0.0), strict=True):
        assert end == pytest.approx(run.ends["transfer", task.action] if task.transfer else run.ends[task.action])
