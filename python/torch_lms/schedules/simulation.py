"""Runs a schedule without processes: finds deadlocks and wrong orders, and predicts when what happens.

Note [Ordering invariants]: every stage does each microbatch's forward and backward exactly once, on one rank; a forward
comes after that of the stage before, a backward after that of the stage after and after its own forward, and a backward
of weights after that of inputs. Ranks do their actions one after the other in the order of the schedule, so a schedule
that breaks an order across ranks stops: no rank can go on.

Note [Transfers]: what an action made and another rank needs is transferred. From one rank to another there is one
transfer of activations at a time, and one of gradients, in the order in which they were made; both directions, and a
rank's own actions, run at once. Where transfers do not overlap with computing, the rank that receives does nothing else
until a transfer has ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch_lms.errors import PipelineError
from torch_lms.schedules.actions import BACKWARD, FORWARD, INPUT_BACKWARD, WEIGHT_BACKWARD, Action, Schedule

__all__ = [
    "Event",
    "Task",
    "begin_of",
    "check_schedule",
    "ends_of",
    "events_of",
    "in_flight",
    "on_ranks",
    "simulate",
    "tasks_of",
]


@dataclass(frozen=True)
class Event:
    """An action with its times."""

    rank: int
    action: Action
    start_us: float
    end_us: float


@dataclass(frozen=True)
class Task:
    """An action, or the transfer of what it made, with the tasks (by number) that must have ended before it begins."""

    rank: int
    action: Action
    transfer: bool
    needs: tuple[int, ...]


def _needs(action: Action, stages: int) -> Iterator[tuple[str, int]]:
    """Kinds (one of) and stage of what has to be done for the same microbatch before."""
    stage, kind = action.stage, action.kind
    if kind == FORWARD and stage > 0:
        yield FORWARD, stage - 1
    if kind in (BACKWARD, INPUT_BACKWARD):
        yield FORWARD, stage
        if stage + 1 < stages:
            yield BACKWARD + INPUT_BACKWARD, stage + 1
    if kind == WEIGHT_BACKWARD:
        yield INPUT_BACKWARD, stage


def tasks_of(schedule: Schedule, *, overlap: bool = True) -> list[Task]:
    """All actions and transfers, each after what it needs: see Note [Transfers].

    Args:
        schedule: what to run.
        overlap: whether a rank computes while it receives.

    Raises:
        PipelineError: if the schedule stops, with the action that each rank waits in.
    """
    order = _Order(schedule, overlap)
    place = [0] * len(schedule.ranks)
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(schedule.ranks):
            while place[rank] < len(actions) and order.add(rank, actions[place[rank]]):
                place[rank] += 1
                progress = True
    stuck = [
        f"rank {rank} in {own[at]}"
        for rank, (own, at) in enumerate(zip(schedule.ranks, place, strict=False))
        if at < len(own)
    ]
    if stuck:
        raise PipelineError(f"expected a schedule that ends, found it stuck: {', '.join(stuck)}; reorder these actions")
    return order.tasks


def begin_of(task: Task, ends_us: Sequence[float]) -> float:
    """When a task begins: when those that it needs have ended."""
    return max((ends_us[one] for one in task.needs), default=0.0)


def ends_of(
    tasks: Sequence[Task], duration_us: Callable[[Action], float], transfer_us: Callable[[Action], float]
) -> list[float]:
    """When each task ends if each begins as soon as it can."""
    ends_us: list[float] = []
    for task in tasks:
        took_us = (transfer_us if task.transfer else duration_us)(task.action)
        ends_us.append(begin_of(task, ends_us) + took_us)
    return ends_us


class _Order:
    """Tasks as they come to be."""

    def __init__(self, schedule: Schedule, overlap: bool) -> None:
        self.stages = schedule.stages
        self.rank_of = schedule.rank_of
        self.overlap = overlap
        self.tasks: list[Task] = []
        self.done: dict[Action, int] = {}
        self.sent: dict[Action, int] = {}
        self.latest: dict[tuple[int, ...], int] = {}  # on each rank, and of each lane between two

    def add(self, rank: int, action: Action) -> bool:
        """Adds an action, unless what it needs is not there yet."""
        sources: list[Action] = []
        for kinds, stage in _needs(action, self.stages):
            found = [one for kind in kinds if (one := Action(stage, kind, action.microbatch)) in self.done]
            if not found:
                return False
            sources.append(found[0])
        needs = []
        for source in sources:
            if self.rank_of[source.stage] != rank and not self.overlap:
                self.sent[source] = self._append(rank, source, True, [self.done[source]], (rank,))
            needs.append(
                self.sent.get(source, self.done[source]) if source.stage != action.stage else self.done[source]
            )
        self.done[action] = self._append(rank, action, False, needs, (rank,))
        target = self._target(action)
        if self.overlap and target not in (None, rank):
            assert target is not None  # said above
            lane = rank, target, int(action.kind == FORWARD)
            self.sent[action] = self._append(rank, action, True, [self.done[action]], lane)
        return True

    def _target(self, action: Action) -> int | None:
        """The rank that needs what an action makes for another stage."""
        step = {FORWARD: 1, BACKWARD: -1, INPUT_BACKWARD: -1}.get(action.kind, 0)
        return self.rank_of.get(action.stage + step) if step else None

    def _append(self, rank: int, action: Action, transfer: bool, needs: list[int], place: tuple[int, ...]) -> int:
        before = [self.latest[place]] if place in self.latest else []
        self.tasks.append(Task(rank, action, transfer, tuple(dict.fromkeys([*needs, *before]))))
        self.latest[place] = len(self.tasks) - 1
        return self.latest[place]


def simulate(
    schedule: Schedule,
    duration_us: Callable[[Action], float] = lambda action: 1.0,
    transfer_us: Callable[[Action], float] = lambda action: 0.0,
    *,
    overlap: bool = True,
) -> list[Event]:
    """The times of all actions, if each starts as soon as its rank is free and what it needs has arrived.

    Args:
        schedule: what to run.
        duration_us: of an action.
        transfer_us: how long what an action made takes to the rank that needs it.
        overlap: whether a rank computes while it receives; see Note [Transfers].

    Raises:
        PipelineError: if the schedule stops, with the action that each rank waits in.
    """
    return events_of(tasks_of(schedule, overlap=overlap), duration_us, transfer_us)


def events_of(
    tasks: Sequence[Task], duration_us: Callable[[Action], float], transfer_us: Callable[[Action], float]
) -> list[Event]:
    """The times of all actions among some tasks, each as soon as it can begin."""
    ends = ends_of(tasks, duration_us, transfer_us)
    events = [
        Event(task.rank, task.action, begin_of(task, ends), end)
        for task, end in zip(tasks, ends, strict=True)
        if not task.transfer
    ]
    return sorted(events, key=lambda event: (event.start_us, event.rank))


def on_ranks(schedule: Schedule, ranks: Sequence[int]) -> Schedule:
    """A schedule on fewer ranks: those that come together do their actions in the order of a run with equal times.

    Of actions that begin at once backwards come first, since they free memory.

    Args:
        schedule: of the ranks that there were.
        ranks: for each of these the new one.
    """
    together: list[list[tuple[float, int, Action]]] = [[] for _ in range(1 + max(ranks))]
    for event in simulate(schedule):
        forward = int(event.action.kind == FORWARD)
        together[ranks[event.rank]].append((event.start_us, forward, event.action))
    return Schedule.of(schedule.name, [[action for _, _, action in sorted(own)] for own in together])


def check_schedule(schedule: Schedule) -> None:
    """Checks the ordering invariants.

    Raises:
        PipelineError: naming the first action that breaks one.
    """
    counts = Counter(action for _, action in schedule)
    homes: dict[int, int] = {}
    for rank, action in schedule:
        if counts[action] > 1:
            raise PipelineError(f"expected each action once, found {action} {counts[action]} times; leave one")
        if homes.setdefault(action.stage, rank) != rank:
            raise PipelineError(f"expected stage {action.stage} on one rank, found {action} on rank {rank} as well")
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            kinds = "".join(kind for kind in "FBIW" if counts[Action(stage, kind, microbatch)])
            if kinds not in ("FB", "FIW"):
                raise PipelineError(
                    f"expected a forward and one backward of stage {stage}, microbatch {microbatch}, "
                    f"found {kinds or 'none'}"
                )
    simulate(schedule)


def in_flight(schedule: Schedule, stage: int) -> int:
    """The most microbatches that a stage keeps activations of at once."""
    held, most = 0, 0
    for _, action in schedule:
        if action.stage == stage:
            held += {FORWARD: 1, BACKWARD: -1, WEIGHT_BACKWARD: -1}.get(action.kind, 0)
            most = max(most, held)
    return most
