"""Runs a schedule without processes: finds deadlocks and wrong orders, and predicts when what happens.

Note [Ordering invariants]: every stage does each microbatch's forward and backward exactly once, on one rank; a forward
comes after that of the stage before, a backward after that of the stage after and after its own forward, and a backward
of weights after that of inputs. Ranks do their actions one after the other in the order of the schedule, so a schedule
that breaks an order across ranks stops: no rank can go on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch_lms.errors import PipelineError
from torch_lms.schedules.actions import BACKWARD, FORWARD, INPUT_BACKWARD, WEIGHT_BACKWARD, Action, Schedule

__all__ = ["Event", "check_schedule", "in_flight", "simulate"]


@dataclass(frozen=True)
class Event:
    """An action with its times."""

    rank: int
    action: Action
    start_us: float
    end_us: float


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


def simulate(
    schedule: Schedule,
    duration_us: Callable[[Action], float] = lambda action: 1.0,
    transfer_us: Callable[[Action], float] = lambda action: 0.0,
) -> list[Event]:
    """The times of all actions, if each starts as soon as its rank is free and what it needs has arrived.

    Args:
        schedule: what to run.
        duration_us: of an action.
        transfer_us: how long what an action made takes to the rank that needs it.

    Raises:
        PipelineError: if the schedule stops, with the action that each rank waits in.
    """
    done: dict[Action, Event] = {}
    place, free_us = [0] * len(schedule.ranks), [0.0] * len(schedule.ranks)
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(schedule.ranks):
            while place[rank] < len(actions):
                ready_us = _ready_us(actions[place[rank]], rank, schedule.stages, done, transfer_us)
                if ready_us is None:
                    break
                action, start_us = actions[place[rank]], max(ready_us, free_us[rank])
                done[action] = Event(rank, action, start_us, start_us + duration_us(action))
                free_us[rank] = done[action].end_us
                place[rank] += 1
                progress = True
    stuck = [
        f"rank {rank} in {own[at]}"
        for rank, (own, at) in enumerate(zip(schedule.ranks, place, strict=False))
        if at < len(own)
    ]
    if stuck:
        raise PipelineError(f"expected a schedule that ends, found it stuck: {', '.join(stuck)}; reorder these actions")
    return sorted(done.values(), key=lambda event: (event.start_us, event.rank))


def _ready_us(
    action: Action, rank: int, stages: int, done: dict[Action, Event], transfer_us: Callable[[Action], float]
) -> float | None:
    ready_us = 0.0
    for kinds, stage in _needs(action, stages):
        source = next((done[a] for kind in kinds if (a := Action(stage, kind, action.microbatch)) in done), None)
        if source is None:
            return None
        ready_us = max(ready_us, source.end_us + (transfer_us(source.action) if source.rank != rank else 0.0))
    return ready_us


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
