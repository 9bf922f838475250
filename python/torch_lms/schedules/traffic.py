"""What a rank receives and sends in a schedule, and where among its own actions.

Note [Traffic]: a transport does all that a rank gives it one after the other, each when the actions given before it are
over and the other rank has come to it too. So transfers have one order for all ranks, that of the moments at which they
can begin if every action takes as long as it should. A rank comes to a receive before the action in which it then is,
or behind it, whichever is nearer. Before that moment it would wait on the device, after it the other rank would, and
what a GPU computes beside such a wait takes longer.

A send has ended for certain where an action begins that could not do so without it: there nobody waits for it, and what
was sent may go.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter

from torch_lms.schedules.actions import FORWARD, INPUT_BACKWARD, WEIGHT_BACKWARD, Action, Schedule
from torch_lms.schedules.simulation import Task, begin_of, ends_of, tasks_of

__all__ = ["StageTimes", "Traffic", "Transfer", "expected_us", "in_turn", "traffic_of"]

# Of each stage the forward, the backward, and where that has two parts the second one, of weights.
StageTimes = tuple[Sequence[float], Sequence[float], Sequence[float]]

# Of an action, so that what needs a transfer ends after it, as exact as numbers are. What is no number is the least.
_LEAST_US, _MOST_US = 0.01, 1e9


@dataclass(frozen=True)
class Transfer:
    """One transfer, on one of its two ranks.

    Attributes:
        made_by: the action whose result is transferred.
        used_by: the action that needs it.
        receives: whether this rank is the one that does.
        place: how many actions of this rank come before it.
    """

    made_by: Action
    used_by: Action
    receives: bool
    place: int


@dataclass(frozen=True)
class Traffic:
    """One rank's transfers; see Note [Traffic].

    Attributes:
        transfers: in order.
        ended: of each action of this rank, those before it whose sends have ended when it begins.
    """

    transfers: tuple[Transfer, ...]
    ended: Mapping[Action, tuple[Action, ...]]


def expected_us(times_us: StageTimes | None = None) -> Callable[[Action], float]:
    """How long each action takes, at least for the order of transfers.

    Args:
        times_us: by default all stages take equally long.
    """

    def duration_us(action: Action) -> float:
        if times_us is None:  # the first stage has no gradients of inputs
            forward_us, backward_us, weights_us = 1.0, 2.0, 1.0 if action.stage else 2.0
        else:
            forward_us, backward_us, weights_us = (own[action.stage] for own in times_us)
        parts_us = {FORWARD: forward_us, INPUT_BACKWARD: backward_us - weights_us, WEIGHT_BACKWARD: weights_us}
        return parts_us.get(action.kind, backward_us)

    return duration_us


def in_turn(tasks: Sequence[Task], duration_us: Callable[[Action], float]) -> list[Task]:
    """The same tasks where each rank has one transfer at a time, and none before it comes to it: see Note [Traffic].

    Args:
        tasks: of a schedule.
        duration_us: of each action, for the order of transfers.
    """
    needs = {number: list(task.needs) for number, task in enumerate(tasks)}
    number_of = {(task.action, task.transfer): number for number, task in enumerate(tasks)}
    for rank in sorted({task.rank for task in tasks}):
        own = [number for number, task in enumerate(tasks) if task.rank == rank and not task.transfer]
        before: list[int] = []
        for one in _transfers(tasks, rank, duration_us):
            number = number_of[one.made_by, True]
            needs[number] += before
            if one.place:
                needs[number].append(own[one.place - 1])
            before = [number]
    order = list(TopologicalSorter(needs).static_order())
    place = {number: at for at, number in enumerate(order)}
    return [replace(tasks[number], needs=tuple(dict.fromkeys(place[one] for one in needs[number]))) for number in order]


def traffic_of(schedule: Schedule, rank: int, duration_us: Callable[[Action], float]) -> Traffic:
    """The transfers of a rank.

    Args:
        schedule: of all ranks.
        rank: whose transfers.
        duration_us: of each action; all ranks give the same.

    Raises:
        PipelineError: if the schedule stops.
    """
    tasks = tasks_of(schedule)
    return Traffic(_transfers(tasks, rank, duration_us), _ended(tasks, rank))


def _transfers(tasks: Sequence[Task], rank: int, duration_us: Callable[[Action], float]) -> tuple[Transfer, ...]:

    def taken_us(action: Action) -> float:
        return min(_MOST_US, max(_LEAST_US, duration_us(action)))

    ends_us = ends_of(tasks, taken_us, lambda action: 0.0)
    made: list[tuple[float, int]] = []  # when a transfer can begin, and its number
    middles_us: list[float] = []  # of the rank's own actions
    uses: dict[int, Task] = {}
    for number, task in enumerate(tasks):
        if task.transfer:
            made.append((ends_us[number], number))
            continue
        uses.update((one, task) for one in task.needs if tasks[one].transfer)
        if task.rank == rank:
            middles_us.append((begin_of(task, ends_us) + ends_us[number]) / 2)
    found = []
    for begin_us, number in sorted(made):
        use = uses[number]
        if rank in (use.rank, tasks[number].rank):
            place = bisect_left(middles_us, begin_us)
            found.append(Transfer(tasks[number].action, use.action, use.rank == rank, place))
    return tuple(found)


def _ended(tasks: list[Task], rank: int) -> dict[Action, tuple[Action, ...]]:
    before: list[int] = []  # of each task, the tasks that come before it, as bits
    sent: dict[Action, int] = {}
    found: dict[Action, tuple[Action, ...]] = {}
    for number, task in enumerate(tasks):
        bits = 0
        for one in task.needs:
            bits |= before[one] | 1 << one
        before.append(bits)
        if task.rank == rank and task.transfer:
            sent[task.action] = number
        elif task.rank == rank:
            found[task.action] = tuple(action for action, at in sent.items() if bits >> at & 1)
            sent = {action: at for action, at in sent.items() if not bits >> at & 1}
    return found
