from __future__ import annotations

import itertools
from importlib.util import find_spec

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_lms.errors import PipelineError
from torch_lms.schedules.actions import Action, Schedule
from torch_lms.schedules.rules import gpipe, interleaved, make_schedule, one_f_one_b, zero_bubble
from torch_lms.schedules.simulation import check_schedule, in_flight, on_ranks, simulate

GOLDEN = {
    "gpipe": (
        gpipe(3, 4),
        """
        0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3
        1F0,1F1,1F2,1F3,1B0,1B1,1B2,1B3
        2F0,2F1,2F2,2F3,2B0,2B1,2B2,2B3
        """,
    ),
    "1f1b": (
        one_f_one_b(3, 5),
        """
        0F0,0F1,0F2,0B0,0F3,0B1,0F4,0B2,0B3,0B4
        1F0,1F1,1B0,1F2,1B1,1F3,1B2,1F4,1B3,1B4
        2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3,2F4,2B4
        """,
    ),
    "interleaved": (
        interleaved(2, 4, 4),
        """
        0F0,0F1,2F0,2F1,0F2,2B0,0F3,2B1,2F2,0B0,2F3,0B1,2B2,2B3,0B2,0B3
        1F0,1F1,3F0,3B0,3F1,3B1,1F2,1B0,1F3,1B1,3F2,3B2,3F3,3B3,1B2,1B3
        """,
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_schedule_is_that_of_its_golden_table(name: str) -> None:
    schedule, golden = GOLDEN[name]
    assert schedule.ranks == Schedule.parse(golden.replace(" ", "")).ranks


@given(st.integers(1, 9), st.integers(1, 12))
def test_schedules_keep_the_order_and_say_what_they_hold(stages: int, microbatches: int) -> None:
    for schedule in (gpipe(stages, microbatches), one_f_one_b(stages, microbatches)):
        check_schedule(schedule)
        assert Schedule.parse(str(schedule), schedule.name) == schedule
    for stage in range(stages):
        assert in_flight(gpipe(stages, microbatches), stage) == microbatches
        assert in_flight(one_f_one_b(stages, microbatches), stage) == min(microbatches, stages - stage)
    slots = 2 * (microbatches + stages - 1)  # the well-known bubble of both
    assert max(event.end_us for event in simulate(gpipe(stages, microbatches))) == slots
    assert max(event.end_us for event in simulate(one_f_one_b(stages, microbatches))) == slots


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_interleaved_schedules_keep_the_order(ranks: int, local: int, rounds: int) -> None:
    schedule = interleaved(ranks, ranks * local, ranks * rounds)
    check_schedule(schedule)
    assert Schedule.parse(str(schedule), schedule.name) == schedule


class MadeUpStage:
    """What the schedules of torch.distributed.pipelining ask of a stage before anything runs."""

    def __init__(self, index: int, ranks: int, stages: int) -> None:
        import torch

        self.stage_index, self.num_stages = index, stages
        self.group_rank, self.group_size, self.group = index % ranks, ranks, None
        self.is_first, self.is_last, self.has_backward = index == 0, index == stages - 1, False
        self.device, self.submod = torch.device("cpu"), torch.nn.Identity()


@pytest.mark.skipif(find_spec("torch.distributed.pipelining") is None, reason="this PyTorch has none to compare with")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("name", "theirs"), [("interleaved", "ScheduleInterleaved1F1B"), ("zero_bubble", "ScheduleInterleavedZeroBubble")]
)
def test_schedules_of_several_stages_a_rank_are_those_of_pytorch(name: str, theirs: str, ranks: int) -> None:
    """For one to three stages on each rank and up to nine microbatches; what one refuses the other does too."""
    from torch.distributed import pipelining

    for local, microbatches in itertools.product((1, 2, 3), range(1, 10)):
        own = [MadeUpStage(place * ranks, ranks, ranks * local) for place in range(local)]
        sizes = {"ranks": ranks, "stages": ranks * local, "microbatches": microbatches}
        try:
            made = getattr(pipelining, theirs)(own, microbatches, loss_fn=lambda *_: None)
        except ValueError:
            with pytest.raises(PipelineError, match="equal rounds"):
                make_schedule(name, **sizes)
            continue
        ours = make_schedule(name, **sizes)
        check_schedule(ours)
        assert ours.ranks == Schedule.from_torch(name, made.pipeline_order).ranks


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_zero_bubble_keeps_the_order_and_holds_less_than_interleaved(ranks: int, local: int, rounds: int) -> None:
    made, like = zero_bubble(ranks, ranks * local, ranks * rounds), interleaved(ranks, ranks * local, ranks * rounds)
    check_schedule(made)
    assert Schedule.parse(str(made), made.name) == made
    assert in_flight(made, 0) <= in_flight(like, 0)
    halves = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    ends = [max(event.end_us for event in simulate(one, lambda a: halves[a.kind])) for one in (made, like)]
    assert ends[0] <= ends[1]


def test_ranks_that_come_together_take_turns() -> None:
    made = on_ranks(one_f_one_b(2, 2), [0, 0])
    check_schedule(made)
    assert str(made) == "0F0,0F1,1F0,1B0,0B0,1F1,1B1,0B1"
    apart = on_ranks(gpipe(4, 3), [0, 1, 0, 1])
    check_schedule(apart)
    assert [sorted({action.stage for action in own}) for own in apart.ranks] == [[0, 2], [1, 3]]


def test_a_link_carries_one_transfer_at_a_time() -> None:
    events = {str(event.action): event for event in simulate(gpipe(2, 3), transfer_us=lambda action: 5.0)}
    assert [events[f"1F{index}"].start_us for index in range(3)] == [6, 11, 16]
    waiting = simulate(gpipe(2, 3), transfer_us=lambda action: 5.0, overlap=False)
    events = {str(event.action): event for event in waiting}
    assert [events[f"1F{index}"].start_us for index in range(3)] == [6, 12, 18]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", "stuck: rank 0 in 0B0, rank 1 in 1F1"),
        ("0B0,0F0\n1F0,1B0", "stuck"),
        ("0F0,0F0,0B0\n1F0,1B0", "0F0 2 times"),
        ("0F0\n1F0,1B0", "stage 0, microbatch 0, found F"),
        ("0F0,0B0,1B0\n1F0", "1F0 on rank 1"),
        ("0F0,0W0,0I0\n1F0,1B0", "stuck"),
    ],
)
def test_broken_orders_are_found_without_processes(table: str, message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        check_schedule(Schedule.parse(table))


def test_a_zero_bubble_table_is_a_schedule_too() -> None:
    check_schedule(Schedule.parse("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1"))


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2F", "0F0 1F0"])
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(PipelineError, match=r"action"):
        Schedule.parse(text)


def test_actions_print_and_parse() -> None:
    assert str(Action(12, "B", 3)) == "12B3"
    assert Action.parse("12B3") == Action(12, "B", 3)


@pytest.mark.parametrize(
    ("name", "ranks", "stages", "microbatches", "message"),
    [
        ("1f1b", 2, 4, 4, "4 stages on 2 ranks"),
        ("interleaved", 2, 3, 4, "3 stages on 2 ranks"),
        ("interleaved", 4, 8, 9, "multiple of the 4 ranks"),
        ("gpipe", 0, 0, 4, "at least one"),
        ("pipedream", 2, 2, 2, "'pipedream'"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(
    name: str, ranks: int, stages: int, microbatches: int, message: str
) -> None:
    with pytest.raises(PipelineError, match=message):
        make_schedule(name, ranks=ranks, stages=stages, microbatches=microbatches)
