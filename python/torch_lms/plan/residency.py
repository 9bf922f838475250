"""Which storages are on the device at each place, if decisions are carried out: memory without time.

Note [Order of events at a place]: before the op, what it uses is brought in or replayed, and so is what depends on a
storage that it writes; then it makes its outputs; after it, released storages go, storages leave as decided, and copies
in may begin. What begins to come in after a place counts as on the device from then on.

Note [Recipes hold their inputs]: from the place that makes a storage until its last planned return or its release, its
recipe holds its inputs. An input that the program has released stays, on the device or dropped itself, until no recipe
holds it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch_lms.plan.decision import DROP_UNCHANGED, HOST, KEEP, RECOMPUTE, Decision
from torch_lms.plan.trace import Recipe, Trace

__all__ = ["PlaceEvents", "Residency", "memory_bytes"]

_ABSENT, _DEVICE, _ON_HOST, _DROPPED = range(4)


@dataclass(slots=True)
class PlaceEvents:
    """What happens around one place.

    Attributes:
        memory_bytes: the most that is in use at once, without copies out that have not ended.
        arrivals: storages whose copies in begin; those for this place come last.
        waited: storages, among those that come in by copies, that must have arrived before the op begins.
        replayed: storages that are made again, in order.
        served: storages that the op reads from the host, or writes there.
        leaving: storages that leave after the op, and whether by a copy.
        swapped_bytes: away on the host during the op.
        host_bytes: what the host holds during the op: these, and the copies that stay there all the time.
        dropped_bytes: neither here nor there during the op.
    """

    memory_bytes: int = 0
    arrivals: list[int] = field(default_factory=list)
    waited: list[int] = field(default_factory=list)
    replayed: list[int] = field(default_factory=list)
    served: list[int] = field(default_factory=list)
    leaving: list[tuple[int, bool]] = field(default_factory=list)
    swapped_bytes: int = 0
    host_bytes: int = 0
    dropped_bytes: int = 0


class Residency:
    """Goes through cycles place by place; what recurs stays where it was from one cycle to the next.

    Args:
        trace: of the cycle.
        decisions: what leaves and when.
    """

    def __init__(self, trace: Trace, decisions: Iterable[Decision]) -> None:
        count = len(trace.storages)
        self._trace = trace
        self._bytes = [storage.bytes for storage in trace.storages]
        self._recipes: list[Recipe | None] = [storage.recompute for storage in trace.storages]
        self._leave: dict[int, list[Decision]] = defaultdict(list)
        self._return: dict[int, list[int]] = defaultdict(list)
        self._planned_drops = [0] * count
        self._copy_stays = [False] * count
        for given in decisions:
            if given.decision == KEEP or given.out_after is None:
                continue
            self._leave[given.out_after].append(given)
            if given.in_after is not None:
                self._return[given.in_after].append(given.storage)
            if given.decision == RECOMPUTE:
                self._planned_drops[given.storage] += 1
            if given.decision in (DROP_UNCHANGED, HOST):
                self._copy_stays[given.storage] = True
        for place, storages in self._return.items():
            storages.sort(key=partial(self._next_use, place))
        self._dependents = self._dependents_of_written()
        self._state = [_ABSENT] * count
        self._serving = [False] * count
        self._copied_in = [False] * count
        self._lasting = [number for number, storage in enumerate(trace.storages) if storage.lasting]
        self._coming: list[int] = []
        self._began: tuple[list[int], list[int]] = ([], [])
        self._begin_lasting()

    def cycle(self) -> Iterator[PlaceEvents]:
        """The events of one cycle, by place. Call it again for the next one."""
        self._begin_cycle()
        self._began = self._now()
        for place in range(len(self._trace.ops)):
            yield self._step(place)
        self._end_cycle()

    @property
    def steady(self) -> bool:
        """Whether the last cycle ended as it began, so that the next one is like it."""
        return self._began == self._now()

    def _now(self) -> tuple[list[int], list[int]]:
        return [self._state[number] for number in self._lasting], list(self._coming)

    def _begin_lasting(self) -> None:
        """Puts storages that last where a cycle is likely to leave them; a second cycle corrects what is not so."""
        last_left = {one.storage: place for place in sorted(self._leave) for one in self._leave[place]}
        kinds = {one.storage: one.decision for place in sorted(self._leave) for one in self._leave[place]}
        last_back = {storage: place for place in sorted(self._return) for storage in self._return[place]}
        for number in self._lasting:
            left, uses = last_left.get(number, -1), self._trace.storages[number].uses
            away = left >= (uses[-1] if uses else 0) or kinds.get(number) == HOST
            back = last_back.get(number, -1) > left and kinds.get(number) != HOST
            self._state[number] = _ON_HOST if away and not back else _DEVICE
            self._serving[number] = away and kinds.get(number) == HOST
            if away and back and last_back[number] == len(self._trace.ops) - 1:
                self._coming.append(number)

    def _next_use(self, place: int, storage: int) -> int:
        uses = self._trace.storages[storage].uses
        at = bisect_right(uses, place)
        if at < len(uses):
            return uses[at]
        return (uses[0] if uses else 0) + len(self._trace.ops)

    def _dependents_of_written(self) -> dict[int, list[int]]:
        """For each storage that is written and that recipes in use read: the storages of these recipes."""
        dependents: dict[int, list[int]] = defaultdict(list)
        for number, drops in enumerate(self._planned_drops):
            recipe = self._recipes[number]
            if drops and recipe is not None:
                for given in recipe.inputs:
                    if self._trace.storages[given].writes:
                        dependents[given].append(number)
        return dependents

    def _begin_cycle(self) -> None:
        count = len(self._bytes)
        self._drops_left = list(self._planned_drops)
        self._holding = [False] * count
        self._holders = [0] * count
        self._released = [False] * count
        self._outside_bytes = 0
        for number, storage in enumerate(self._trace.storages):
            if not storage.lasting:
                self._state[number] = _DEVICE if storage.producer is None else _ABSENT
                self._serving[number] = False
        self._use_bytes = sum(size for size, state in zip(self._bytes, self._state, strict=True) if state == _DEVICE)
        self._swapped_bytes = self._host_bytes = self._dropped_bytes = 0
        for number, size in enumerate(self._bytes):
            self._count_host(number, size if self._state[number] == _ON_HOST else 0)
            self._host_bytes += size if self._copy_stays[number] else 0

    def _end_cycle(self) -> None:
        self._coming = [number for number in self._coming if self._trace.storages[number].lasting]

    def _step(self, place: int) -> PlaceEvents:
        index = self._trace.by_place
        events = PlaceEvents(arrivals=self._coming)
        self._coming = []
        self._peak_bytes = self._use_bytes
        if self._dependents:
            for written in index.written[place]:
                self._before_write(written, events)
        for used in index.used[place]:
            if self._state[used] != _DEVICE:
                self._need(used, events)
            elif self._copied_in[used]:
                events.waited.append(used)
        for made in index.made[place]:
            self._make(made, place)
        self._peak_bytes = max(self._peak_bytes, self._use_bytes + self._outside_bytes)
        events.memory_bytes = self._peak_bytes + self._trace.ops[place].other_bytes
        events.swapped_bytes, events.dropped_bytes = self._swapped_bytes, self._dropped_bytes
        events.host_bytes = self._host_bytes
        for released in index.released[place]:
            self._released[released] = True
            if not self._holders[released]:
                self._free(released)
        for given in self._leave.get(place, ()):
            self._let_leave(given, events)
        for storage in self._return.get(place, ()):
            if self._state[storage] == _ON_HOST and not self._serving[storage]:
                self._bring(storage)
                self._coming.append(storage)
        return events

    def _make(self, storage: int, place: int) -> None:
        self._state[storage] = _DEVICE
        self._use_bytes += self._bytes[storage]
        recipe = self._recipes[storage]
        if self._drops_left[storage] and recipe is not None and not self._writes_input(recipe, place):
            self._holding[storage] = True
            self._outside_bytes += recipe.outside_bytes
            for given in recipe.inputs:
                self._holders[given] += 1

    def _writes_input(self, recipe: Recipe, place: int) -> bool:
        written = self._trace.by_place.written[place]
        return bool(written) and not set(written).isdisjoint(recipe.inputs)

    def _before_write(self, written: int, events: PlaceEvents) -> None:
        """Brings back what depends on a storage that is about to be written; its recipe is no good afterwards."""
        for dependent in self._dependents.get(written, ()):
            if self._state[dependent] == _DROPPED:
                self._need(dependent, events)
            if self._holding[dependent]:
                self._drops_left[dependent] = 0
                self._end_recipe(dependent)

    def _need(self, wanted: int, events: PlaceEvents) -> None:
        """Has a storage on the device, and first, one after the other, what its recipe reads."""
        stack = [wanted]
        while stack:
            storage = stack[-1]
            state = self._state[storage]
            if state == _DROPPED:
                recipe = self._recipes[storage]
                assert recipe is not None
                missing = [given for given in recipe.inputs if self._missing(given)]
                if missing:
                    stack.extend(missing)
                    continue
                self._replay(storage, recipe, events)
            elif state == _ON_HOST:
                if self._serving[storage]:
                    events.served.append(storage)
                else:
                    self._bring(storage)
                    events.arrivals.append(storage)
                    events.waited.append(storage)
            else:
                events.waited.append(storage)
            stack.pop()

    def _missing(self, storage: int) -> bool:
        state = self._state[storage]
        return state == _DROPPED or (state == _ON_HOST and not self._serving[storage])

    def _replay(self, storage: int, recipe: Recipe, events: PlaceEvents) -> None:
        for given in recipe.inputs:
            (events.served if self._state[given] == _ON_HOST else events.waited).append(given)
        self._state[storage] = _DEVICE
        self._use_bytes += self._bytes[storage]
        self._dropped_bytes -= self._bytes[storage]
        self._peak_bytes = max(self._peak_bytes, self._use_bytes + self._outside_bytes)
        events.replayed.append(storage)
        if not self._drops_left[storage]:
            self._end_recipe(storage)

    def _bring(self, storage: int) -> None:
        self._copied_in[storage] = True
        self._state[storage] = _DEVICE
        self._use_bytes += self._bytes[storage]
        self._count_host(storage, -self._bytes[storage])

    def _count_host(self, storage: int, more_bytes: int) -> None:
        self._swapped_bytes += more_bytes
        if not self._copy_stays[storage]:
            self._host_bytes += more_bytes

    def _let_leave(self, given: Decision, events: PlaceEvents) -> None:
        storage = given.storage
        recomputed = given.decision == RECOMPUTE
        if recomputed:
            self._drops_left[storage] = max(0, self._drops_left[storage] - 1)
        if self._state[storage] == _DEVICE and (not recomputed or self._holding[storage]):
            self._use_bytes -= self._bytes[storage]
            if recomputed:
                self._state[storage] = _DROPPED
                self._dropped_bytes += self._bytes[storage]
                return
            self._state[storage] = _ON_HOST
            self._count_host(storage, self._bytes[storage])
            self._serving[storage] = given.decision == HOST
            unchanged = given.decision == DROP_UNCHANGED or (given.decision == HOST and self._is_unchanged(storage))
            events.leaving.append((storage, not unchanged))
        elif recomputed and self._holding[storage] and not self._drops_left[storage] and not self._is_dropped(storage):
            self._end_recipe(storage)

    def _is_unchanged(self, storage: int) -> bool:
        given = self._trace.storages[storage]
        return given.lasting and not given.writes

    def _is_dropped(self, storage: int) -> bool:
        return self._state[storage] == _DROPPED

    def _free(self, first: int) -> None:
        """Frees a storage that nobody holds, and the inputs that only its recipe held."""
        stack = [first]
        while stack:
            storage = stack.pop()
            state, size = self._state[storage], self._bytes[storage]
            if state == _DEVICE:
                self._use_bytes -= size
            elif state == _ON_HOST:
                self._count_host(storage, -size)
            elif state == _DROPPED:
                self._dropped_bytes -= size
            self._state[storage] = _ABSENT
            if self._holding[storage]:
                stack.extend(self._let_go(storage))

    def _end_recipe(self, storage: int) -> None:
        for given in self._let_go(storage):
            self._free(given)

    def _let_go(self, storage: int) -> list[int]:
        """Ends a recipe; the inputs that nobody holds any more."""
        recipe = self._recipes[storage]
        assert recipe is not None
        self._holding[storage] = False
        self._outside_bytes -= recipe.outside_bytes
        freed = []
        for given in recipe.inputs:
            self._holders[given] -= 1
            if self._released[given] and not self._holders[given]:
                freed.append(given)
        return freed


def memory_bytes(trace: Trace, decisions: Sequence[Decision]) -> list[int]:
    """The memory in use at each place in a steady cycle, if every copy out ends at once."""
    residency = Residency(trace, decisions)
    memory = [events.memory_bytes for events in residency.cycle()]
    if not residency.steady:
        memory = [events.memory_bytes for events in residency.cycle()]
    return memory
