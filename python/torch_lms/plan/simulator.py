"""Times a plan: the host, one compute stream, one copy direction out and one in, and the limit that makes them wait.

Note [Reserved memory]: what begins to come in after a place is charged from that place on, so its copy begins when all
that is charged there fits. Then no copy in can take the room that an op needs, and memory that fits at every place once
copies out have ended always comes free: waiting ends.

Note [Both directions at once]: each is slower beside the other. A copy is timed when it begins, by what the other
direction is known to do then, whose last copy it holds up as long. What has been waited for before is not timed again.

Note [The host]: it submits ops ahead of the device, one after the other, and each copy and each op that is run again
takes of its time, too. An op cannot begin before it is submitted, nor end before the host has submitted all of it.
Memory is charged when the host asks for it: a copy out that has not ended then takes room, although the device may have
done it by the time at which it runs the op. The host gets no further ahead than the device's queue is long, and not
past ops after which it waits. Where a trace does not know the host's times, each op is submitted when the one before it
ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from torch_lms.plan.decision import Decision, check_decisions
from torch_lms.plan.residency import CycleEvents, Residency
from torch_lms.plan.timeline import IN, OUT, Timeline
from torch_lms.plan.trace import Trace

__all__ = ["simulate"]

_QUEUE_LENGTH = 1024  # kernels that CUDA takes before the host waits; each op has one at least


def simulate(trace: Trace, decisions: Iterable[Decision], limit_bytes: int | None = None) -> Timeline:
    """One steady cycle of a program that carries out decisions under a limit.

    Args:
        trace: of the program.
        decisions: for the storages that leave; all others are kept.
        limit_bytes: of the memory in use; None lets nothing wait for memory.

    Returns:
        The timeline. Where the decisions need more than the limit it goes on and says so in ``excess_bytes``.

    Raises:
        PlanError: for a decision that its storage does not allow.
    """
    given = list(decisions)
    check_decisions(trace, given)
    residency = Residency(trace, given)
    clock = _Clock(trace, limit_bytes)
    events = residency.cycle()
    timeline = clock.cycle(events)
    if clock.goes_on or not residency.steady:  # the next cycle begins otherwise than this one did
        timeline = clock.cycle(events if residency.steady else residency.cycle())
    return timeline


@dataclass(slots=True)
class _Copying:
    """One copy of a storage, from when to when."""

    storage: int
    start_us: float
    end_us: float


class _Lane:
    """One direction of the link, which does one copy after the other.

    Args:
        storages: how many there are.
        slower: by which share of the time that both directions copy, copies take longer.

    Attributes:
        ends_us: by storage, when its latest copy has ended.
    """

    def __init__(self, storages: int, slower: float) -> None:
        self.ends_us = [0.0] * storages
        self._began_us = 0.0  # the copies without a pause of which this is the last
        self._last = _Copying(0, 0.0, 0.0)  # none, as nothing goes on beside it
        self._slower = slower

    @property
    def free_us(self) -> float:
        """When the last copy ends."""
        return self._last.end_us

    def add(self, storage: int, from_us: float, takes_us: float, other: _Lane) -> _Copying:
        """Copies a storage, from then on at the earliest. See Note [Both directions at once]."""
        start_us = max(from_us, self.free_us)
        if start_us > self.free_us:
            self._began_us = start_us
        both_us = min(start_us + takes_us, other.free_us) - max(start_us, other._began_us)
        longer_us = self._slower * both_us if both_us > 0 else 0.0
        self._last = _Copying(storage, start_us, start_us)
        self._go_on(takes_us + longer_us)
        if longer_us:
            other._go_on(longer_us)
        return self._last

    def _go_on(self, by_us: float) -> None:
        """The last copy takes so much longer."""
        self._last.end_us += by_us
        self.ends_us[self._last.storage] = self._last.end_us


class _Clock:
    """When the three streams are free, from one cycle to the next.

    Args:
        trace: of the cycle.
        limit_bytes: of the memory in use.
    """

    def __init__(self, trace: Trace, limit_bytes: int | None) -> None:
        count = len(trace.storages)
        self._bytes, self._link, self._limit_bytes = trace.by_storage.bytes, trace.link, limit_bytes
        self._durations_us = [op.duration_us for op in trace.ops]
        self._replay_us = [0.0 if one is None else one.duration_us for one in trace.by_storage.recipes]
        self._host, self._waits = trace.host, frozenset(trace.host.waits)
        self._has_host = bool(trace.host.op_us)
        self._ends_us: deque[float] = deque([0.0], maxlen=_QUEUE_LENGTH)  # of the latest ops
        self._host_us = 0.0  # when the host can submit what is next
        slower = 1.0 / trace.link.share_beside - 1.0
        self._in, self._out = _Lane(count, slower), _Lane(count, slower)
        self._now_us = 0.0
        self._leaving: deque[_Copying] = deque()  # copies out, in order
        self._leaving_bytes = 0
        self._moves: list[tuple[_Copying, str]] = []  # of the cycle

    @property
    def goes_on(self) -> bool:
        """Whether a copy goes on when compute is done, or the host is ahead of it."""
        return max(self._out.free_us, self._in.free_us) > self._now_us or 0 < self._host_us < self._now_us

    def cycle(self, events: CycleEvents) -> Timeline:
        """Runs one cycle; times in the timeline begin with it."""
        began_us, timeline = self._now_us, Timeline.of_places(len(self._durations_us))
        moving = events.arrivals.keys() | events.replayed.keys() | events.served.keys() | events.leaving.keys()
        for place in range(len(self._durations_us)):
            if place in moving or not self._passes(place, events, timeline, began_us):
                self._step(place, events, timeline, began_us)
        moves, self._moves = self._moves, []
        timeline.moves = [(one.storage, way, one.start_us - began_us, one.end_us - began_us) for one, way in moves]
        timeline.planned_bytes, timeline.swapped_bytes = events.memory_bytes, events.swapped_bytes
        timeline.dropped_bytes, timeline.replayed = events.dropped_bytes, events.replayed
        timeline.host_peak_bytes = max(events.host_bytes)
        timeline.recompute_us, timeline.waits_us = sum(timeline.replay_us), sum(timeline.wait_us)
        busy_us = dict.fromkeys((OUT, IN), 0.0)
        for _, direction, start_us, end_us in timeline.moves:
            busy_us[direction] += end_us - start_us
        timeline.step_us = max(self._now_us - began_us, timeline.host_us, *busy_us.values())
        return timeline

    def _passes(self, place: int, events: CycleEvents, timeline: Timeline, began_us: float) -> bool:
        """Most places: nothing moves, and the op has what it needs. False if it has to wait, or there is no room."""
        before_us = self._now_us
        submitted_us = self._host_is_free_us(place) if self._has_host else before_us
        start_us = max(before_us, submitted_us)
        if self._leaving:
            self._forget_left(submitted_us)
        memory_bytes = events.memory_bytes[place] + self._leaving_bytes
        if self._limit_bytes is not None and memory_bytes > self._limit_bytes:
            return False
        for storage in events.waited.get(place, ()):
            if self._in.ends_us[storage] > start_us:
                return False
        self._now_us = start_us + self._durations_us[place]
        if self._has_host:
            self._submit_op(place, submitted_us, 0, timeline)
        timeline.memory_bytes[place] = memory_bytes
        timeline.start_us[place] = start_us - began_us
        timeline.end_us[place] = self._now_us - began_us
        timeline.late_us[place] = start_us - before_us
        return True

    def _step(self, place: int, events: CycleEvents, timeline: Timeline, began_us: float) -> None:
        before_us = self._now_us
        submitted_us = self._submit(place, events, timeline) if self._has_host else before_us
        room_us, room_by = self._wait_for_room(events.memory_bytes[place], submitted_us, timeline)
        could_us = max(before_us, submitted_us)
        start_us, blamed = max(before_us, room_us), room_by
        for storage in events.arrivals.get(place, ()):
            self._copy_in(storage, max(before_us, room_us), timeline)
        for storage in events.waited.get(place, ()):
            if self._in.ends_us[storage] > start_us:
                start_us, blamed = self._in.ends_us[storage], storage
        if start_us > could_us and blamed is not None:
            timeline.wait_of[blamed] = timeline.wait_of.get(blamed, 0.0) + start_us - could_us
        if self._leaving:
            self._forget_left(room_us if self._has_host else start_us)
        timeline.memory_bytes[place] = events.memory_bytes[place] + self._leaving_bytes
        replay_us = sum([self._replay_us[storage] for storage in events.replayed.get(place, ())])
        served_us = sum([self._link.in_us(self._bytes[storage]) for storage in events.served.get(place, ())])
        self._now_us = start_us + replay_us + self._durations_us[place] + served_us
        if self._has_host:
            copied = sum(copied for _, copied in events.leaving.get(place, ()))
            self._submit_op(place, room_us, copied, timeline)
        for storage, copied in events.leaving.get(place, ()):
            self._leave(storage, copied, timeline)
        timeline.start_us[place] = start_us - began_us
        timeline.end_us[place] = self._now_us - began_us
        timeline.wait_us[place] = start_us - could_us
        timeline.late_us[place] = could_us - before_us
        timeline.replay_us[place] = replay_us
        timeline.served_us[place] = served_us

    def _submit(self, place: int, events: CycleEvents, timeline: Timeline) -> float:
        """When the host begins to submit an op: after the copies in, and the ops that are run again, before it."""
        spent_us = len(events.arrivals.get(place, ())) * self._host.pagein_us
        spent_us += len(events.replayed.get(place, ())) * self._host.recompute_us
        timeline.host_us += spent_us
        return self._host_is_free_us(place) + spent_us

    def _host_is_free_us(self, place: int) -> float:
        """From when on it can submit what a place has."""
        before = place - 1 if place else len(self._durations_us) - 1
        return max(self._host_us, self._now_us if before in self._waits else 0.0, self._ends_us[0])

    def _submit_op(self, place: int, from_us: float, copies_out: int, timeline: Timeline) -> None:
        """The host submits the op, and the copies out after it."""
        spent_us = self._host.op_us[place]
        self._now_us = max(self._now_us, from_us + spent_us)
        spent_us += copies_out * self._host.pageout_us
        self._host_us = from_us + spent_us
        timeline.host_us += spent_us
        self._ends_us.append(self._now_us)

    def _wait_for_room(self, need_bytes: int, now_us: float, timeline: Timeline) -> tuple[float, int | None]:
        """When copies out have freed enough, and the storage whose copy was the last that had to end."""
        if self._leaving:
            self._forget_left(now_us)
        if self._limit_bytes is None:
            return now_us, None
        over_bytes = need_bytes + self._leaving_bytes - self._limit_bytes
        room_us, last = now_us, None
        while over_bytes > 0 and self._leaving:
            gone = self._leaving.popleft()
            room_us, last = gone.end_us, gone.storage
            self._leaving_bytes -= self._bytes[last]
            over_bytes -= self._bytes[last]
        if over_bytes > timeline.excess_bytes:
            timeline.excess_bytes = over_bytes
        return room_us, last

    def _forget_left(self, now_us: float) -> None:
        while self._leaving and self._leaving[0].end_us <= now_us:
            self._leaving_bytes -= self._bytes[self._leaving.popleft().storage]

    def _copy_in(self, storage: int, from_us: float, timeline: Timeline) -> None:
        takes_us = self._link.in_us(self._bytes[storage])
        came = self._in.add(storage, max(from_us, self._out.ends_us[storage]), takes_us, self._out)
        self._moves.append((came, IN))
        timeline.in_bytes += self._bytes[storage]

    def _leave(self, storage: int, copied: bool, timeline: Timeline) -> None:
        ready_us = max(self._now_us, self._in.ends_us[storage])
        if not copied:
            self._out.ends_us[storage] = ready_us
            return
        left = self._out.add(storage, ready_us, self._link.out_us(self._bytes[storage]), self._in)
        self._moves.append((left, OUT))
        timeline.out_bytes += self._bytes[storage]
        self._leaving.append(left)
        self._leaving_bytes += self._bytes[storage]
