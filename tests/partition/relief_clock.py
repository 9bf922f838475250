"""A pipeline whose stages give segments up, run part by part on clocks: every copy, every wait, every byte."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch_lms.partition import Choice, LinkSpec
from torch_lms.partition.device_step import StageWork
from torch_lms.schedules import Action, Schedule

__all__ = ["Clock", "run_with_relief"]


@dataclass
class Clock:
    """One device: what it holds, and when it and its link are free.

    Attributes:
        now_us: when the device is free.
        peak_bytes: the most that was in use while something ran.
        held: of each stage and microbatch, by segment; None is all else.
    """

    link: LinkSpec
    now_us: float = 0.0
    out_free_us: float = 0.0
    in_free_us: float = 0.0
    peak_bytes: float = 0.0
    held: dict[tuple[int, int, int | None], float] = field(default_factory=dict)
    leaving: list[tuple[float, float]] = field(default_factory=list)  # end and bytes
    left_us: dict[tuple[int, int, int | None], float] = field(default_factory=dict)
    back_us: dict[tuple[int, int, int | None], float] = field(default_factory=dict)

    def look(self, working_bytes: float) -> None:
        """Something runs now."""
        leaving = sum(nbytes for end_us, nbytes in self.leaving if end_us > self.now_us)
        self.peak_bytes = max(self.peak_bytes, sum(self.held.values()) + leaving + working_bytes)

    def send(self, key: tuple[int, int, int | None]) -> None:
        """A copy out; takes room until it has ended."""
        nbytes = self.held.pop(key)
        self.out_free_us = max(self.out_free_us, self.now_us) + self.link.transfer_us(nbytes)
        self.left_us[key] = self.out_free_us
        self.leaving.append((self.out_free_us, nbytes))

    def fetch(self, key: tuple[int, int, int | None], nbytes: float) -> None:
        """A copy in; takes room at once."""
        if key not in self.back_us:
            self.in_free_us = max(self.in_free_us, self.now_us, self.left_us[key]) + self.link.transfer_us(nbytes)
            self.back_us[key] = self.in_free_us
            self.held[key] = nbytes


class _Stage:
    def __init__(self, number: int, work: StageWork, choice: Choice, clock: Clock) -> None:
        self.number, self.work, self.clock = number, work, clock
        self.segments = work.need.offers.segments
        self.swapped = [one.segment for one in choice if one.stage == number and one.swapped]
        self.again = [one.segment for one in choice if one.stage == number and not one.swapped]
        self.working = float(work.need.transient_bytes)
        self.waiting: list[int] = []  # microbatches whose backward has not begun

    def forward(self, microbatch: int) -> None:
        self.waiting.append(microbatch)
        rest = float(self.work.need.held_bytes) - sum(one.saved_bytes for one in self.segments)
        self.clock.held[self.number, microbatch, None] = rest
        for part in self.work.parts:
            key = (self.number, microbatch, part.segment)
            if part.segment is not None:
                self.clock.held[key] = self.segments[part.segment].saved_bytes
                if part.segment in self.again:
                    self.clock.held[key] += self.segments[part.segment].entering_bytes
            self.clock.look(self.working)
            self.clock.now_us += part.forward_us
            if part.segment in self.again:
                self.clock.held[key] = self.segments[part.segment].entering_bytes
            if part.segment in self.swapped:
                self.clock.send(key)

    def backward(self, microbatch: int, kind: str) -> None:
        times_us = [part.weights_us if kind == "W" else part.backward_us for part in self.work.parts]
        if kind == "W" and self.again:  # all of backward once more
            times_us = [part.backward_us + part.weights_us for part in self.work.parts]
        rest = self.number, microbatch, None
        if kind != "W":
            self.waiting.remove(microbatch)
        if kind == "I":
            self.clock.held[rest] += float(self.work.need.kept_bytes)
        for part, took_us in reversed(list(zip(self.work.parts, times_us, strict=True))):
            if part.segment is not None:
                self._have(microbatch, part.segment)
            twice = kind == "W" and part.segment in self.again  # what the inputs' part did not use is still there
            working = float(self.work.need.input_transient_bytes) if kind == "I" else self.working
            self.clock.look(working + (self.segments[part.segment or 0].saved_bytes if twice else 0))
            if part.segment in self.again:
                self.clock.now_us += self.segments[part.segment].again_us / self.work.need.speed
            self.clock.now_us += took_us
            if part.segment is not None and kind != "I":
                del self.clock.held[self.number, microbatch, part.segment]
        if kind == "I":
            self.clock.held[rest] -= float(self.work.need.freed_bytes)
        else:
            del self.clock.held[rest]

    def _have(self, microbatch: int, segment: int) -> None:
        key, one = (self.number, microbatch, segment), self.segments[segment]
        if segment in self.swapped:
            self.clock.fetch(key, one.saved_bytes)
            following = self._following(microbatch, segment)
            if following is not None:
                self.clock.fetch(following, self.segments[following[2] or 0].saved_bytes)
            self.clock.now_us = max(self.clock.now_us, self.clock.back_us[key])
        if segment in self.again:
            self.clock.held[key] = one.saved_bytes + one.entering_bytes

    def _following(self, microbatch: int, segment: int) -> tuple[int, int, int] | None:
        """The segment that comes back while this one's backward runs."""
        before = [other for other in self.swapped if other < segment]
        if before:
            return self.number, microbatch, max(before)
        return (self.number, self.waiting[0], max(self.swapped)) if self.waiting else None


def run_with_relief(
    schedule: Schedule, works: Mapping[int, StageWork], choice: Choice, link: LinkSpec, *, alone: int | None = None
) -> list[Clock]:
    """The clocks of all ranks after a step with free transfers between them.

    Args:
        schedule: of the actions.
        works: of all stages.
        choice: what they give up.
        link: of each rank to the host.
        alone: a rank that never waits for others; only it is run.
    """
    clocks = [Clock(link) for _ in schedule.ranks]
    stages = {number: _Stage(number, work, choice, clocks[schedule.rank_of[number]]) for number, work in works.items()}
    queues = [list(own) if alone in (None, rank) else [] for rank, own in enumerate(schedule.ranks)]
    ended: dict[Action, float] = {}
    while any(queues):
        for rank, queue in enumerate(queues):
            ready = [] if not queue or alone is not None else _before(queue[0], schedule.stages)
            if not queue or any(not any(one in ended for one in either) for either in ready):
                continue
            action = queue.pop(0)
            latest = max((ended[one] for either in ready for one in either if one in ended), default=0.0)
            clocks[rank].now_us = max(clocks[rank].now_us, latest)
            if action.kind == "F":
                stages[action.stage].forward(action.microbatch)
            else:
                stages[action.stage].backward(action.microbatch, action.kind)
            ended[action] = clocks[rank].now_us
    return clocks


def _before(action: Action, stages: int) -> list[list[Action]]:
    """What other stages must have done: of each list one."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "F" and stage > 0:
        return [[Action(stage - 1, "F", microbatch)]]
    if action.kind in "BI" and stage + 1 < stages:
        return [[Action(stage + 1, kind, microbatch) for kind in "BI"]]
    return []
