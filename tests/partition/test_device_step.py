"""What devices give up, as plan's simulator prices it: against a clock of its own, and against all choices."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from tests.partition.relief_clock import run_with_relief
from torch_lms.partition import Choice, CostModel, GivenUp, LinkSpec, RecomputeAndSwap, StageNeed
from torch_lms.partition.device_step import DeviceStep, Part, RelievedDevice, StageWork, relieve
from torch_lms.partition.offers import Offers, Segment
from torch_lms.partition.steps import BACKWARDS, FORWARDS, ROWS, WEIGHTS, TrainingStep
from torch_lms.schedules import Schedule

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")


class Drawn:
    """A random pipeline: its schedule, its stages, and the link of each device to the host."""

    def __init__(self, seed: int, *, schedules: tuple[str, ...] = SCHEDULES, segments: int = 5) -> None:
        draw = random.Random(seed)
        name, ranks = draw.choice(schedules), draw.randint(1, 3)
        stages = ranks * (draw.randint(1, 2) if name in ("interleaved", "zero_bubble") else 1)
        self.model = CostModel(schedule=name, microbatches=ranks * draw.randint(1, 3), input_backward_share=0.4)
        self.step = TrainingStep.of([f"d{stage % ranks}" for stage in range(stages)], self.model)
        self.works = {stage: self._work(draw, stage, segments) for stage in range(stages)}
        self.link = LinkSpec(bytes_per_us=draw.choice([3.0, 10.0, 30.0, 100.0]), latency_us=draw.choice([0.0, 1.0]))
        self.draw = draw

    @property
    def schedule(self) -> Schedule:
        return self.step.schedule

    def _work(self, draw: random.Random, stage: int, most: int) -> StageWork:
        segments, parts = [], []
        for number in range(draw.randint(1, most)):
            if draw.random() < 0.3:
                parts.append(self._part(stage, draw.uniform(0, 10), draw.uniform(0, 20)))
            forward_us = draw.uniform(5, 20)
            parts.append(self._part(stage, forward_us, 2 * forward_us, number))
            segments.append(
                Segment(
                    names=(f"s{number}",),
                    units=(number,),
                    again_us=forward_us * draw.choice([1.0, 0.8]),
                    saved_bytes=float(draw.randint(50, 400)),
                    entering_bytes=float(draw.choice([0, 20])),
                    recomputable=draw.random() < 0.9,
                )
            )
        count, forward_us = len(segments), sum(part.forward_us for part in parts)
        rest, split = draw.randint(0, 100), self.model.schedule == "zero_bubble"
        need = StageNeed(
            time_us=np.float64(forward_us + sum(part.backward_us + part.weights_us for part in parts)),
            forward_us=np.float64(forward_us),
            static_bytes=np.float64(draw.randint(0, 100)),
            held_bytes=np.float64(sum(one.saved_bytes for one in segments) + rest),
            transient_bytes=np.float64(draw.randint(0, 30)),
            kept_bytes=np.float64(split * draw.randint(0, 300)),
            freed_bytes=np.float64(split * draw.randint(0, rest)),
            input_transient_bytes=np.float64(split * draw.randint(0, 30)),
            in_flight=self.step.in_flight[stage],
            moments=self.step.alone[stage],
            replays=self.step.replays,
            offers=Offers(segments=tuple(segments), first=np.zeros(count, np.int64), end=np.ones(count, np.int64)),
            end=1,
        )
        return StageWork(parts=tuple(parts), need=need)

    def _part(self, stage: int, forward_us: float, backward_us: float, segment: int | None = None) -> Part:
        inputs, weights = (share * backward_us for share in self.model.relief_shares(stage))
        return Part(forward_us=forward_us, backward_us=inputs, weights_us=weights, segment=segment)

    def of_rank(self, rank: int) -> DeviceStep:
        works = {stage: self.works[stage] for stage in self.step.stages_of[rank]}
        return DeviceStep(self.schedule.ranks[rank], works, self.link)

    def choice(self, *, swaps: bool = True) -> Choice:
        """A random one of all stages."""
        found = []
        for stage, work in self.works.items():
            for number, one in enumerate(work.need.offers.segments):
                kinds = [None] + [True] * swaps + [False] * one.recomputable
                kind = self.draw.choice(kinds)
                if kind is not None:
                    found.append(GivenUp(stage, number, kind))
        return tuple(found)

    def static_bytes(self, rank: int) -> float:
        return sum(float(self.works[stage].need.static_bytes) for stage in self.step.stages_of[rank])

    def priced(self, choice: Choice) -> tuple[float, list[float]]:
        """The whole pipeline's step, and each device's memory."""
        rows = np.zeros((ROWS, len(self.works)))
        for stage, work in self.works.items():
            rows[FORWARDS, stage] = work.need.forward_us
            rows[BACKWARDS, stage] = sum(part.backward_us for part in work.parts)
            rows[WEIGHTS, stage] = sum(part.weights_us for part in work.parts)
        ranks = range(len(self.schedule.ranks))
        found = [
            self.of_rank(rank).price(tuple(one for one in choice if one.stage in self.step.stages_of[rank]))
            for rank in ranks
        ]
        more_us = {action: us for one in found for action, us in one.more_us.items()}
        return self.step.path(rows, more_us)[0], [one.memory_bytes for one in found]


@pytest.mark.parametrize("seed", range(120))
def test_a_device_takes_what_a_clock_says(seed: int) -> None:
    """To the byte and the microsecond; where replays are counted twice, in the worst case."""
    drawn = Drawn(seed)
    for _ in range(4):
        choice = drawn.choice()
        for rank in range(len(drawn.schedule.ranks)):
            own = tuple(one for one in choice if one.stage in drawn.step.stages_of[rank])
            priced = drawn.of_rank(rank).price(own)
            clock = run_with_relief(drawn.schedule, drawn.works, choice, drawn.link, alone=rank)[rank]
            memory = clock.peak_bytes + drawn.static_bytes(rank)
            if drawn.step.replays == 1 or all(one.swapped for one in own):
                assert priced.total_us == pytest.approx(clock.now_us)
                assert priced.memory_bytes == pytest.approx(memory)
            else:
                assert clock.now_us <= priced.total_us * (1 + 1e-9) <= clock.now_us * 1.05
                assert memory <= priced.memory_bytes


@pytest.mark.parametrize("seed", range(120))
def test_a_device_that_gives_nothing_up_takes_what_its_moments_say(seed: int) -> None:
    drawn = Drawn(seed)
    needs = {stage: work.need for stage, work in drawn.works.items()}
    for rank, own in enumerate(drawn.step.stages_of):
        assert drawn.of_rank(rank).price(()).memory_bytes == drawn.step.memory_bytes(rank, needs)
        for stage in own:
            assert drawn.of_rank(rank).only(stage).price(()).memory_bytes == needs[stage].memory_bytes


@pytest.mark.parametrize("seed", range(120))
def test_a_pipeline_takes_no_longer_than_is_said(seed: int) -> None:
    """With the bubbles that a device's trace does not have; and just as long where nothing is swapped."""
    drawn = Drawn(seed)
    for swaps in (False, True, True, True):
        choice = drawn.choice(swaps=swaps)
        step_us, memory = drawn.priced(choice)
        clocks = run_with_relief(drawn.schedule, drawn.works, choice, drawn.link)
        true_us = max(clock.now_us for clock in clocks)
        assert true_us <= step_us * (1 + 1e-9)
        if not swaps or len(clocks) == 1:
            assert step_us == pytest.approx(true_us)
        for rank, clock in enumerate(clocks):
            assert clock.peak_bytes + drawn.static_bytes(rank) <= memory[rank] * (1 + 1e-9)


def test_the_choice_is_nearly_the_best_of_all() -> None:
    """Of all ways to keep, swap or compute again each segment of a stage; what no clock but plan's decides."""
    steps = []
    for seed in range(120):
        drawn = Drawn(seed, schedules=("gpipe", "1f1b"), segments=4)
        own = drawn.step.stages_of[0]
        whole, segments = drawn.of_rank(0), drawn.works[0].need.offers.segments
        kinds = [(None, True, False) if one.recomputable else (None, True) for one in segments]
        every = [
            whole.price(tuple(GivenUp(0, number, kind) for number, kind in enumerate(each) if kind is not None))
            for each in itertools.product(*kinds)
        ]
        plain = every[0]
        least = min(one.memory_bytes for one in every)
        usable = least + drawn.draw.random() * (plain.memory_bytes - least - 1)
        if usable <= least:
            continue
        best_us = min(one.total_us for one in every if one.memory_bytes <= usable)
        actions, works = drawn.schedule.ranks[0], {stage: drawn.works[stage] for stage in own}
        for relief in (RecomputeAndSwap(host_link=drawn.link), RecomputeAndSwap()):
            found = relieve(relief, actions, [works], usable)
            assert found.memory_bytes <= math.ceil(usable) or relief.host_link is None
            if relief.host_link is not None:
                steps.append((plain.total_us + sum(found.more_us.values())) / best_us)
    assert max(steps) < 1.15
    assert sum(steps) / len(steps) < 1.01


def test_swaps_that_come_last_are_for_devices_that_do_not_fit_without() -> None:
    used = {False: 0, True: 0}  # devices that fit without, for which others would swap, and that need swaps
    for seed in range(40):
        drawn = Drawn(seed, segments=4)
        for rank, own in enumerate(drawn.step.stages_of):
            actions, works = drawn.schedule.ranks[rank], {stage: drawn.works[stage] for stage in own}
            usable = int(drawn.of_rank(rank).price(()).memory_bytes * drawn.draw.uniform(0.4, 1.0))
            reliefs = (
                RecomputeAndSwap(host_link=link, swap_last=last)
                for link, last in ((None, False), (drawn.link, False), (drawn.link, True))
            )
            alone, first, last = (relieve(relief, actions, [works], usable) for relief in reliefs)
            if alone.memory_bytes <= usable:
                assert last == alone
                used[False] += swaps(first)
            else:
                assert rank_of(last, usable) <= min(rank_of(first, usable), rank_of(alone, usable))
                used[True] += last.memory_bytes <= usable and swaps(last)
    assert min(used.values()) > 2, used


def swaps(device: RelievedDevice) -> bool:
    return any(one.swapped for one in device.stage_relief.values())


def rank_of(device: RelievedDevice, usable_bytes: float) -> tuple[float, float]:
    """What is better is lower."""
    more_us = round(sum(device.more_us.values()), 6)
    return 0.0 if device.memory_bytes <= usable_bytes else device.memory_bytes, more_us


@pytest.mark.parametrize("seed", range(60))
def test_the_estimate_swaps_only_stages_that_do_not_fit_without(seed: int) -> None:
    """And with less room no stage that fits seems to be faster."""
    drawn = Drawn(seed)
    for work in drawn.works.values():
        usable = np.linspace(0.2, 1.1, 40) * work.need.memory_bytes
        reliefs = (
            RecomputeAndSwap(host_link=link, swap_last=last)
            for link, last in ((None, False), (drawn.link, False), (drawn.link, True))
        )
        alone, first, last = (relief.relieve(work.need, usable) for relief in reliefs)
        fits = alone.memory_bytes <= usable
        for found, same in ((last.time_us, alone.time_us), (last.memory_bytes, alone.memory_bytes)):
            assert np.array_equal(found[fits], same[fits])
        assert np.array_equal(last.memory_bytes <= usable, first.memory_bytes <= usable)
        assert np.all(last.memory_bytes <= alone.memory_bytes)
        assert np.all(np.diff(last.time_us[last.memory_bytes <= usable]) <= 0)
