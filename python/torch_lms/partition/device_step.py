"""What one device does in a step as a trace of ``torch_lms.plan``, and what its stages best give up in it.

Note [A device's step as a trace]: an op of the trace is the forward or the backward of a part of a stage for one
microbatch: of a segment that may be given up, or of a run of other units. Ops come in the order of the schedule's
actions. A storage is what a segment saves of one microbatch, from its forward to its backward; another one is all else
that the stage holds of it (Note [Stage memory] in ``costs``), from the begin of its forward to the end of its backward.
Of a backward in two parts there are two more (Note [Half done] in ``moments``): what the first part frees, as far as
it is of no segment, and the gradients that it keeps.
What ``torch_lms.stages.giving_up`` does becomes decisions: a segment that is computed again is dropped when its forward
is over and replayed before its backward; one that is swapped goes out then, and begins to come back with the backward
of the swapped one before it, be that of this microbatch or of the one whose backward comes first. Nothing waits for
copies out: until they have ended, they take room.

Note [Bubbles]: the trace has no bubbles. In them copies would go on, and later ops would wait less for them, never
more. So what is found for a step in which the device has to wait is what it takes at most.

Note [Two graph tasks]: zero bubble's two parts of a backward are two of autograd's graph tasks, and checkpoints compute
a segment again in each. What enters it, and what the first one did not use, is there until the second has ended,
beside the second's own. And where anything is computed again the second task goes through the first one's backward
once more (Note [Groups of weights] in ``pipeline.weight_groups``), for which it has a longer op. The simulator knows
nothing of the rest: the second replay's time is added to the second part, and the most that all this may take to the
memory. The first stage, which has no gradients of inputs, in truth does all this once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from torch_lms.partition.link_spec import LinkSpec
from torch_lms.partition.relief import Choice, MemoryRelief, StageNeed, StageRelief
from torch_lms.plan.decision import RECOMPUTE, SWAP, Decision
from torch_lms.plan.simulator import simulate
from torch_lms.plan.trace import Link, Recipe, Trace, TraceOp, TraceStorage
from torch_lms.schedules.actions import FORWARD, INPUT_BACKWARD, KINDS, WEIGHT_BACKWARD, Action

__all__ = ["DeviceStep", "Part", "Priced", "RelievedDevice", "StageWork", "relieve"]

_NO_LINK = LinkSpec(bytes_per_us=1.0)  # where nothing is swapped
_ROUNDING = 1e-9
_ROUNDS = 3  # over all segments, to improve a choice


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some units of a stage that run one after the other, and the segment that they are, if they are one.

    Of a backward in two parts ``backward_us`` is the first, of inputs, and ``weights_us`` the second.
    """

    forward_us: float
    backward_us: float
    weights_us: float = 0.0
    segment: int | None = None


@dataclass(frozen=True, kw_only=True)
class StageWork:
    """A stage: its parts in order, and what it takes."""

    parts: tuple[Part, ...]
    need: StageNeed

    def times_us(self, kind: str) -> list[float]:
        """What an action takes for each part."""
        if kind == FORWARD:
            return [part.forward_us for part in self.parts]
        if kind == WEIGHT_BACKWARD:
            return [part.weights_us for part in self.parts]
        return [part.backward_us for part in self.parts]

    def again_in_weights_us(self) -> list[float]:
        """What a backward of weights takes that goes through that of inputs once more; see Note [Two graph tasks]."""
        return [part.backward_us + part.weights_us for part in self.parts]


@dataclass(frozen=True, kw_only=True)
class Priced:
    """What a choice comes to.

    Attributes:
        memory_bytes: at the worst moment.
        more_us: by which each action is longer than without.
        total_us: of all actions.
    """

    memory_bytes: float
    more_us: Mapping[Action, float]
    total_us: float


@dataclass(frozen=True, kw_only=True)
class RelievedDevice:
    """A device whose stages give up what they must.

    Attributes:
        memory_bytes: at the worst moment of all its stages together.
        more_us: by which each action is longer.
        stage_memory_bytes: of each stage, at its own worst moment.
        stage_relief: what each stage gives up.
    """

    memory_bytes: int
    more_us: Mapping[Action, float]
    stage_memory_bytes: Mapping[int, int]
    stage_relief: Mapping[int, StageRelief]


class DeviceStep:
    """The actions of a device, and what each choice makes of them.

    Args:
        actions: in their order.
        works: of the stages.
        host_link: of swaps.
    """

    def __init__(self, actions: Sequence[Action], works: Mapping[int, StageWork], host_link: LinkSpec | None) -> None:
        self._actions, self.works, self._host_link = actions, works, host_link
        self._place: dict[tuple[Action, int], int] = {}  # of each part, and of a backward's begin
        for action in actions:
            count = len(works[action.stage].parts)
            for part in range(count) if action.kind == FORWARD else range(count, -1, -1):
                self._place[action, part] = len(self._place)
        self._storage: dict[tuple[int, int, int], int] = {}  # by stage, microbatch and segment
        self._traces: dict[frozenset[int], Trace] = {}
        self._prices: dict[Choice, Priced] = {}

    @cached_property
    def _backwards(self) -> dict[int, list[Action]]:
        """Of each stage, in order; where backward has two parts the first."""
        found: dict[int, list[Action]] = {stage: [] for stage in self.works}
        for action in self._actions:
            if action.kind not in (FORWARD, WEIGHT_BACKWARD):
                found[action.stage].append(action)
        return found

    def _trace_with(self, again: frozenset[int]) -> Trace:
        """Of the step in which some stages compute segments again."""
        if again not in self._traces:
            self._traces[again] = self._trace(again)
        return self._traces[again]

    def _trace(self, again: frozenset[int]) -> Trace:
        times_us = {(stage, kind): work.times_us(kind) for stage, work in self.works.items() for kind in KINDS}
        times_us |= {(stage, WEIGHT_BACKWARD): self.works[stage].again_in_weights_us() for stage in again}
        ops = [
            TraceOp(
                name=str(action),
                phase="forward" if action.kind == FORWARD else "backward",
                duration_us=sum(times_us[action.stage, action.kind][part : part + 1]),  # none of a backward's begin
                other_bytes=self._working_bytes(action),
            )
            for action, part in self._place
        ]
        storages: list[TraceStorage] = []
        for stage in self.works:
            for backward in self._backwards[stage]:
                storages += self._storages(backward, len(storages))
        host = self._host_link or _NO_LINK
        link = Link(out_bytes_per_us=host.bytes_per_us, in_bytes_per_us=host.bytes_per_us, latency_us=host.latency_us)
        return Trace(device="", signature="0", link=link, ops=tuple(ops), storages=tuple(storages))

    def _working_bytes(self, action: Action) -> int:
        need = self.works[action.stage].need
        return ceil(need.input_transient_bytes if action.kind == INPUT_BACKWARD else need.transient_bytes)

    def _storages(self, backward: Action, first: int) -> Iterator[TraceStorage]:
        """Of one microbatch; `first` is the number of the first one."""
        stage, microbatch = backward.stage, backward.microbatch
        work = self.works[stage]
        forward, second = (Action(stage, kind, microbatch) for kind in (FORWARD, WEIGHT_BACKWARD))
        last = second if (second, 0) in self._place else backward
        rest_bytes = float(work.need.held_bytes)
        for place, part in enumerate(work.parts):
            if part.segment is None:
                continue
            one = work.need.offers.segments[part.segment]
            rest_bytes -= one.saved_bytes
            self._storage[stage, microbatch, part.segment] = first
            first += 1
            again = Recipe(duration_us=one.again_us / work.need.speed, outside_bytes=ceil(one.entering_bytes))
            yield TraceStorage(
                bytes=ceil(one.saved_bytes),
                producer=self._place[forward, place],
                uses=tuple(sorted({self._place[backward, place], self._place[last, place]})),
                released=self._place[last, place],
                recompute=again if one.recomputable else None,
            )
        yield from self._others(rest_bytes, forward, backward, last)

    def _others(self, nbytes: float, forward: Action, backward: Action, last: Action) -> Iterator[TraceStorage]:
        """All else of a microbatch, and what it has while it is half done; see Note [Half done] in ``moments``."""
        work = self.works[backward.stage]
        begin, end = self._place[forward, 0], self._place[last, 0]
        freed = min(float(work.need.freed_bytes), nbytes) if last != backward else 0.0
        lives = [(nbytes - freed, begin, end)]
        if last != backward:
            lives.append((freed, begin, self._place[backward, 0]))
            lives.append((float(work.need.kept_bytes), self._place[backward, len(work.parts) - 1], end))
        for some, producer, released in lives:
            uses = (released,) if released != producer else ()
            yield TraceStorage(bytes=ceil(some), producer=producer, uses=uses, released=released)

    def only(self, stage: int) -> DeviceStep:
        """One of the stages, as if it were alone."""
        own = [action for action in self._actions if action.stage == stage]
        return DeviceStep(own, {stage: self.works[stage]}, self._host_link)

    def price(self, choice: Choice) -> Priced:
        """What the step takes with a choice."""
        if choice not in self._prices:
            self._prices[choice] = self._price(choice)
        return self._prices[choice]

    def _price(self, choice: Choice) -> Priced:
        again = frozenset(one.stage for one in choice if not one.swapped)
        timeline = simulate(self._trace_with(again), self._decisions(choice))
        more_us, began_us = {}, 0.0
        twice_us, twice_bytes = self._again_in_weights(choice)
        for action in self._actions:
            times_us = self.works[action.stage].times_us(action.kind)
            ended_us = timeline.end_us[self._place[action, len(times_us) - 1 if action.kind == FORWARD else 0]]
            more_us[action] = max(ended_us - began_us - sum(times_us), 0.0)
            if action.kind == WEIGHT_BACKWARD:
                more_us[action] += twice_us[action.stage]
            began_us = ended_us
        static = sum(float(work.need.static_bytes) for work in self.works.values())
        return Priced(
            memory_bytes=static + timeline.peak_bytes + twice_bytes,
            more_us=more_us,
            total_us=began_us + sum(twice_us[one.stage] for one in self._actions if one.kind == WEIGHT_BACKWARD),
        )

    def _again_in_weights(self, choice: Choice) -> tuple[dict[int, float], float]:
        """See Note [Two graph tasks]: what each stage's backward of weights takes longer, and bytes at most."""
        found, most, entering = dict.fromkeys(self.works, 0.0), 0.0, 0.0
        for one in choice:
            need = self.works[one.stage].need
            if need.replays > 1 and not one.swapped:
                segment = need.offers.segments[one.segment]
                found[one.stage] += segment.again_us / need.speed
                most = max(most, segment.saved_bytes)
                entering += need.in_flight * segment.entering_bytes
        return found, most + entering

    def _decisions(self, choice: Choice) -> list[Decision]:
        decisions = []
        for stage, work in self.works.items():
            again = {one.segment for one in choice if one.stage == stage and not one.swapped}
            swapped = {one.segment for one in choice if one.stage == stage and one.swapped}
            following = [place for place, part in enumerate(work.parts) if part.segment in swapped][::-1]
            asked = -1  # the backward with whose begin the next swapped segment begins to come back
            for backward in self._backwards[stage]:
                forward = Action(stage, FORWARD, backward.microbatch)
                for place, part in enumerate(work.parts):
                    if part.segment in again:
                        decisions.append(self._leave(forward, place, part.segment, RECOMPUTE, None))
                for place in following:
                    if asked < self._place[forward, place]:  # nothing asked for it before its own backward does
                        asked = self._place[backward, place]
                    decisions.append(self._leave(forward, place, work.parts[place].segment, SWAP, asked - 1))
                    asked = self._place[backward, place]
        return decisions

    def _leave(self, forward: Action, place: int, segment: int | None, kind: str, back: int | None) -> Decision:
        assert segment is not None
        storage = self._storage[forward.stage, forward.microbatch, segment]
        return Decision(storage=storage, decision=kind, out_after=self._place[forward, place], in_after=back)


def relieve(
    relief: MemoryRelief, actions: Sequence[Action], works: Sequence[Mapping[int, StageWork]], usable_bytes: float
) -> RelievedDevice:
    """Has the stages of a device give up what costs the least time, or makes them as small as they can be.

    Looked for in the first microbatches, as many as can be in flight and one more, if these take as much memory as all;
    where swaps come last, without them first.

    Args:
        relief: what may be given up, in which ways.
        actions: of the device.
        works: of the stages, with their segments; then with runs of these instead, of which none is swapped.
        usable_bytes: of the device.
    """
    tries = [_Try(relief, actions, one, usable_bytes) for one in works]
    best = min((one.without_swaps() for one in tries), key=lambda found: found.rank)
    if relief.host_link is not None and not (relief.swap_last and best.fits):
        best = min(best, tries[0].with_all(), key=lambda found: found.rank)
    return best.relieved()


@dataclass(frozen=True)
class _Found:
    """A choice for a step, and how good that is."""

    step: DeviceStep
    choice: Choice
    usable_bytes: float

    @property
    def priced(self) -> Priced:
        return self.step.price(self.choice)

    @property
    def fits(self) -> bool:
        return _fits(self.priced, self.usable_bytes)

    @property
    def rank(self) -> tuple[float, float]:
        return _rank(self.priced, self.usable_bytes)

    def relieved(self) -> RelievedDevice:
        return _relieved(self.step, self.choice)


class _Try:
    """A device's step with some segments."""

    def __init__(
        self, relief: MemoryRelief, actions: Sequence[Action], works: Mapping[int, StageWork], usable_bytes: float
    ) -> None:
        self._whole = whole = DeviceStep(actions, works, relief.host_link)
        self._usable = usable_bytes
        self._ways = relief.ways({stage: work.need for stage, work in works.items()})
        most = 1 + max(work.need.in_flight for work in works.values())
        some = DeviceStep([one for one in actions if one.microbatch < most], works, relief.host_link)
        self._steps = [whole] if some.price(()).memory_bytes < whole.price(()).memory_bytes else [some, whole]

    def without_swaps(self) -> _Found:
        """The best of the ways in which nothing is swapped."""
        return self._best([way for way in self._ways if not any(one.swapped for choice in way for one in choice)])

    def with_all(self) -> _Found:
        """The best of all ways."""
        return self._best(self._ways)

    def _best(self, ways: Sequence[Sequence[Choice]]) -> _Found:
        best = _Found(self._whole, (), self._usable)
        for step in self._steps if ways else ():
            choice = _Search(step, ways, self._usable).best()
            best = min(best, _Found(self._whole, choice, self._usable), key=lambda found: found.rank)
            if best.fits:
                break
        return best


def _relieved(step: DeviceStep, choice: Choice) -> RelievedDevice:
    priced = step.price(choice)
    alone = {}
    for stage in step.works:
        own = tuple(one for one in choice if one.stage == stage)
        alone[stage] = ceil((priced if len(step.works) == 1 else step.only(stage).price(own)).memory_bytes)
    return RelievedDevice(
        memory_bytes=ceil(priced.memory_bytes),
        more_us=priced.more_us,
        stage_memory_bytes=alone,
        stage_relief={
            stage: StageRelief.of(work.need.offers, [one for one in choice if one.stage == stage])
            for stage, work in step.works.items()
        },
    )


def _fits(priced: Priced, usable_bytes: float) -> bool:
    return priced.memory_bytes <= usable_bytes * (1 + _ROUNDING)


def _rank(priced: Priced, usable_bytes: float) -> tuple[float, float]:
    return 0.0 if _fits(priced, usable_bytes) else priced.memory_bytes, priced.total_us


class _Search:
    """The best of some ways. Their times are taken to fall and then to rise from one to the next."""

    def __init__(self, step: DeviceStep, ways: Sequence[Sequence[Choice]], usable_bytes: float) -> None:
        self._step, self._ways, self._usable = step, ways, usable_bytes
        self._found: dict[int, Choice] = {}
        self._guess = 0

    def best(self) -> Choice:
        """The fastest choice that fits, or the smallest."""
        low, high = 0, len(self._ways) - 1
        while low < high:
            middle = (low + high) // 2
            if self._rank(middle + 1) < self._rank(middle):
                low = middle + 1
            else:
                high = middle
        return self._improved(self._first_that_fits(min(sorted({0, low, *self._found}), key=self._rank)))

    def _improved(self, choice: Choice) -> Choice:
        """Each segment kept, or given up otherwise, where that is better."""
        every = sorted({one for way in self._ways if len(way) > 1 for one in way[-1]})
        for _ in range(_ROUNDS):
            before = choice
            for one in every:
                others = tuple(given for given in choice if given[:2] != one[:2])
                for tried in (others, (*others, one)):
                    choice = min(choice, tried, key=lambda given: _rank(self._step.price(given), self._usable))
            if choice == before:
                break
        return choice

    def _rank(self, way: int) -> tuple[float, float]:
        return _rank(self._step.price(self._first_that_fits(way)), self._usable)

    def _first_that_fits(self, way: int) -> Choice:
        """Of a way; looked for where that of the way before was, and from there on in both directions."""
        if way not in self._found:
            choices = self._ways[way]
            low, high, reach = -1, len(choices) - 1, 1  # not low, at most high
            at = min(max(self._guess - len(choices[0]), 0), high - 1)
            while high - low > 1:
                if _fits(self._step.price(choices[at]), self._usable):
                    high = at
                    at = max(high - reach, (low + high) // 2)
                else:
                    low = at
                    at = min(low + reach, (low + high + 1) // 2)
                reach *= 2
            self._found[way] = choices[high]
            self._guess = len(choices[high])
        return self._found[way]
