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
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from torch_lms.plan.decision import DROP_UNCHANGED, HOST, KEEP, RECOMPUTE, Decision
from torch_lms.plan.trace import Recipe, Trace

__all__ = ["CycleEvents", "Residency", "steady_cycle"]

_ABSENT, _DEVICE, _ON_HOST, _DROPPED = range(4)


@dataclass(slots=True)
class CycleEvents:
    """What happens in a cycle; what most places do not have is there for those that have it.

    Attributes:
        arrivals: storages whose copies in begin; those for this place come last.
        waited: storages that must have arrived, if they came in by copies, before the op begins.
        replayed: storages that are made again, in order.
        served: storages that the op reads from the host, or writes there.
        leaving: storages that leave after the op, and whether by a copy.
        memory_bytes: the most that is in use at once, without copies out that have not ended.
        swapped_bytes: away on the host during the op.
        host_bytes: what the host holds during the op: these, and the copies that stay there all the time.
        dropped_bytes: neither here nor there during the op.
    """

    arrivals: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    waited: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    replayed: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    served: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    leaving: dict[int, list[tuple[int, bool]]] = field(default_factory=lambda: defaultdict(list))
    memory_bytes: list[int] = field(default_factory=list)
    swapped_bytes: list[int] = field(default_factory=list)
    host_bytes: list[int] = field(default_factory=list)
    dropped_bytes: list[int] = field(default_factory=list)


class Residency:
    """Goes through cycles place by place; what recurs stays where it was from one cycle to the next.

    Args:
        trace: of the cycle.
        decisions: what leaves and when.
    """

    def __init__(self, trace: Trace, decisions: Iterable[Decision]) -> None:
        count = len(trace.storages)
        self._trace = trace
        self._index, self._storages = trace.by_place, trace.by_storage
        self._bytes, self._recipes, self._lasting = self._storages.bytes, self._storages.recipes, self._storages.lasting
        self._other_bytes = [op.other_bytes for op in trace.ops]
        self._leave: dict[int, list[Decision]] = defaultdict(list)
        self._return: dict[int, list[int]] = defaultdict(list)
        self._planned_drops = [0] * count
        self._copy_stays = [False] * count
        self._is_copied = [False] * count  # ever
        for given in decisions:
            if given.decision == KEEP or given.out_after is None:
                continue
            self._leave[given.out_after].append(given)
            if given.in_after is not None:
                self._return[given.in_after].append(given.storage)
            if given.decision == RECOMPUTE:
                self._planned_drops[given.storage] += 1
            else:
                self._is_copied[given.storage] = True
            if given.decision in (DROP_UNCHANGED, HOST):
                self._copy_stays[given.storage] = True
        for place, storages in self._return.items():
            storages.sort(key=partial(self._next_use, place))
        self._dependents = self._dependents_of_written()
        self._state = [_ABSENT] * count
        self._serving = [False] * count
        self._stays_bytes = sum(size for size, stays in zip(self._bytes, self._copy_stays, strict=True) if stays)
        self._coming: list[int] = []
        self._began = self._now()
        self._begin_lasting()

    def cycle(self) -> CycleEvents:
        """The events of one cycle. Call it again for the next one."""
        self._begin_cycle()
        self._began, self._events = self._now(), CycleEvents()
        for place in range(len(self._trace.ops)):
            self._step(place)
        self._coming = [number for number in self._coming if self._trace.storages[number].lasting]
        return self._events

    @property
    def steady(self) -> bool:
        """Whether the last cycle ended as it began, so that the next one is like it."""
        return self._began == self._now()

    def _now(self) -> tuple[list[tuple[int, bool]], list[int]]:
        return [(self._state[number], self._serving[number]) for number in self._lasting], list(self._coming)

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
            if drops and (recipe := self._recipes[number]) is not None:
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
        lasting = [(number, self._state[number], self._serving[number]) for number in self._lasting]
        self._state = [_DEVICE if here else _ABSENT for here in self._storages.present]
        self._serving = [False] * count
        self._use_bytes, self._host_bytes = self._storages.present_bytes, self._stays_bytes
        self._swapped_bytes = self._dropped_bytes = 0
        for number, state, serving in lasting:
            self._state[number], self._serving[number] = state, serving
            if state == _DEVICE:
                self._use_bytes += self._bytes[number]
            else:
                self._count_host(number, self._bytes[number])

    def _step(self, place: int) -> None:
        index, state, sizes, events = self._index, self._state, self._bytes, self._events
        self._place = place
        if self._coming:
            events.arrivals[place], self._coming = self._coming, []
        self._peak_bytes = self._use_bytes
        if self._dependents:
            for written in index.written[place]:
                self._before_write(written)
        for used in index.used[place]:
            if state[used] != _DEVICE:
                self._need(used)
            elif self._is_copied[used]:
                events.waited[place].append(used)
        for made in index.made[place]:
            state[made] = _DEVICE
            self._use_bytes += sizes[made]
            if self._drops_left[made]:
                self._begin_recipe(made, place)
        if self._use_bytes + self._outside_bytes > self._peak_bytes:
            self._peak_bytes = self._use_bytes + self._outside_bytes
        events.memory_bytes.append(self._peak_bytes + self._other_bytes[place])
        events.swapped_bytes.append(self._swapped_bytes)
        events.dropped_bytes.append(self._dropped_bytes)
        events.host_bytes.append(self._host_bytes)
        for released in index.released[place]:
            self._released[released] = True
            if not self._holders[released]:
                self._free(released)
        if place in self._leave:
            for given in self._leave[place]:
                self._let_leave(given)
        if place in self._return:
            for storage in self._return[place]:
                if state[storage] == _ON_HOST and not self._serving[storage]:
                    self._bring(storage)
                    self._coming.append(storage)

    def _begin_recipe(self, storage: int, place: int) -> None:
        recipe = self._recipes[storage]
        if recipe is not None and not self._writes_input(recipe, place):
            self._holding[storage] = True
            self._outside_bytes += recipe.outside_bytes
            for given in recipe.inputs:
                self._holders[given] += 1

    def _writes_input(self, recipe: Recipe, place: int) -> bool:
        written = self._index.written[place]
        return bool(written) and not set(written).isdisjoint(recipe.inputs)

    def _before_write(self, written: int) -> None:
        """Brings back what depends on a storage that is about to be written; its recipe is no good afterwards."""
        for dependent in self._dependents.get(written, ()):
            if self._state[dependent] == _DROPPED:
                self._need(dependent)
            if self._holding[dependent]:
                self._drops_left[dependent] = 0
                self._end_recipe(dependent)

    def _need(self, wanted: int) -> None:
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
                self._replay(storage, recipe)
            elif state == _ON_HOST:
                if self._serving[storage]:
                    self._events.served[self._place].append(storage)
                else:
                    self._bring(storage)
                    self._events.arrivals[self._place].append(storage)
                    self._events.waited[self._place].append(storage)
            else:
                self._events.waited[self._place].append(storage)
            stack.pop()

    def _missing(self, storage: int) -> bool:
        state = self._state[storage]
        return state == _DROPPED or (state == _ON_HOST and not self._serving[storage])

    def _replay(self, storage: int, recipe: Recipe) -> None:
        for given in recipe.inputs:
            read = self._events.served if self._state[given] == _ON_HOST else self._events.waited
            read[self._place].append(given)
        self._state[storage] = _DEVICE
        self._use_bytes += self._bytes[storage]
        self._dropped_bytes -= self._bytes[storage]
        used_bytes = self._use_bytes + self._outside_bytes + recipe.working_bytes
        self._peak_bytes = max(self._peak_bytes, used_bytes)
        self._events.replayed[self._place].append(storage)
        if not self._drops_left[storage]:
            self._end_recipe(storage)

    def _bring(self, storage: int) -> None:
        self._state[storage] = _DEVICE
        self._use_bytes += self._bytes[storage]
        self._count_host(storage, -self._bytes[storage])

    def _count_host(self, storage: int, more_bytes: int) -> None:
        self._swapped_bytes += more_bytes
        if not self._copy_stays[storage]:
            self._host_bytes += more_bytes

    def _let_leave(self, given: Decision) -> None:
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
            self._events.leaving[self._place].append((storage, not unchanged))
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
            self._state[storage] = _ABSENT
            if state == _DEVICE:
                self._use_bytes -= size
            elif state == _ON_HOST:
                self._count_host(storage, -size)
            elif state == _DROPPED:
                self._dropped_bytes -= size
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


def steady_cycle(trace: Trace, decisions: Iterable[Decision]) -> CycleEvents:
    """What happens in a cycle that is like the one before it."""
    residency = Residency(trace, decisions)
    cycle = residency.cycle()
    return cycle if residency.steady else residency.cycle()
