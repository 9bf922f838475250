"""All four schedules: steps and memory by device as the actions make them, and the best cuts against enumeration."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.partition.graphs import chain
from tests.partition.half_done import bytes_of_microbatch, on_the_way, peak_along
from tests.partition.random_graphs import contiguous_placements, make_graph, measured
from torch_lms.errors import PartitionError
from torch_lms.partition import (
    CostGraph,
    CostModel,
    CostNode,
    DataParallel,
    DeviceSpec,
    LinkSpec,
    PartitionProblem,
    find_algorithm,
    least_caps,
    partition,
)
from torch_lms.partition import cut_search as search
from torch_lms.partition.contiguous import ContiguousStages, Found
from torch_lms.partition.figures import Figures
from torch_lms.partition.intervals import stage_matrices
from torch_lms.partition.relief import KEEP_ALL
from torch_lms.partition.sequence import UnitSequence
from torch_lms.partition.steps import TrainingStep
from torch_lms.schedules import Action, Event, make_schedule, simulate
from torch_lms.schedules.simulation import events_of, tasks_of
from torch_lms.schedules.traffic import expected_us, in_turn

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
exhaustive = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def copies(draw: st.DrawFn) -> DataParallel:
    """One or three ranks, with gradients in one bucket or in several."""
    link = LinkSpec(bytes_per_us=20.0, latency_us=draw(st.sampled_from([0.0, 0.5])))
    return DataParallel(
        ranks=draw(st.sampled_from([1, 3])), link=link, bucket_bytes=draw(st.sampled_from([10, 40, 1 << 20]))
    )


@st.composite
def shared_problems(draw: st.DrawFn, schedule: str) -> PartitionProblem:
    """Up to eight nodes in up to four stages, on two or three devices in turn, with and without caps and step ends."""
    graph = make_graph(draw(st.integers(0, 10**6)), draw(st.integers(4, 8)))
    count = draw(st.integers(2, 3))
    stages = draw(st.sampled_from([2, 4] if count == 2 else [3]))
    total = sum(graph.parameter_bytes.values()) * 4 + sum(graph.storage_bytes.values()) * 4
    cap = draw(st.one_of(st.none(), st.integers(total // (3 * count), 2 * total // count + 1)))
    each = [
        DeviceSpec(name=f"d{index}", speed=draw(st.sampled_from([1.0, 2.0])), memory_cap_bytes=cap)
        for index in range(count)
    ]
    model = CostModel(
        schedule=schedule,
        microbatches=count * draw(st.integers(1, 3)),
        overlap_communication=draw(st.booleans()),
        memory_buffer=0.0,
        input_backward_share=draw(st.sampled_from([0.5, 0.3])),
        transfer_share=draw(st.sampled_from([0.0, 0.3])),
        transfers_in_turn=draw(st.booleans()),
        outputs_stay=draw(st.booleans()),
        data_parallel=draw(copies()),
        optimizer_offload=draw(st.sampled_from([None, LinkSpec(bytes_per_us=50.0, latency_us=1.0)])),
    )
    link = LinkSpec(bytes_per_us=draw(st.sampled_from([10.0, 100.0])), latency_us=1.0)
    devices = tuple(each[stage % count] for stage in range(stages))
    return PartitionProblem(graph=graph, devices=devices, links=link, cost_model=model)


def fitting(problem: PartitionProblem) -> list[Figures]:
    """Of all contiguous stages of the graph's order."""
    return [made for _, placed in contiguous_placements(problem) if (made := measured(problem, placed)).fits]


def solved(problem: PartitionProblem) -> Found | None:
    links = problem.links_between(problem.devices)
    return ContiguousStages(UnitSequence(problem.units), problem.devices, links, problem.cost_model).solve()


@pytest.mark.parametrize("timed_one_by_one", [0, 1000])
@pytest.mark.parametrize("schedule", SCHEDULES)
@exhaustive
@given(data=st.data())
def test_the_best_contiguous_stages_are_found_under_every_schedule(
    schedule: str, timed_one_by_one: int, data: st.DataObject
) -> None:
    problem = data.draw(shared_problems(schedule))
    every = fitting(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "_ALL_TIMED", timed_one_by_one)
        found = solved(problem)
    if not every:
        assert found is None
        return
    assert found is not None
    assert found.optimal
    assert found.step_us == pytest.approx(min(made.step.step_us for made in every))
    again = measured(problem, UnitSequence(problem.units).stages(found.cuts))
    assert again.fits
    assert again.step.step_us == pytest.approx(found.step_us)
    assert find_algorithm("dp").partition(problem).step_us <= found.step_us * (1 + 1e-9)


@pytest.mark.parametrize("schedule", SCHEDULES)
@exhaustive
@given(data=st.data())
def test_a_search_that_is_cut_short_says_how_much_may_be_missing(schedule: str, data: st.DataObject) -> None:
    problem = data.draw(shared_problems(schedule))
    every = fitting(problem)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"_ALL_TIMED": 0, "_GROWN": 1, "_MOST_BOUNDS": 1, "_MOST_ROUNDS": 0}.items():
            patch.setattr(search, name, value)
        patch.setattr(search, "_BOUND_WORK", 0)
        found = solved(problem)
    if found is not None:
        least = min(made.step.step_us for made in every)
        assert least * (1 - 1e-9) <= found.step_us
        assert found.step_us - found.gap_us <= least * (1 + 1e-9)


@pytest.mark.parametrize("schedule", SCHEDULES)
@exhaustive
@given(data=st.data())
def test_steps_and_memory_of_devices_are_those_of_the_actions(schedule: str, data: st.DataObject) -> None:
    """Without step ends, against `simulate` and a count of what is held along each device's own order."""
    drawn = data.draw(shared_problems(schedule))
    drawn = replace(drawn, graph=replace(drawn.graph, optimizer_us=None))
    slowed = drawn.cost_model.transfer_share
    microbatches = drawn.cost_model.microbatches
    model = CostModel(
        schedule=schedule,
        microbatches=microbatches,
        memory_buffer=0.0,
        transfer_share=slowed,
        transfers_in_turn=drawn.cost_model.transfers_in_turn,
        outputs_stay=drawn.cost_model.outputs_stay,
    )
    problem = PartitionProblem(graph=drawn.graph, devices=drawn.devices, links=drawn.links, cost_model=model)
    if schedule in ("gpipe", "1f1b"):  # a device for each stage, as these have it
        devices = tuple(DeviceSpec(name=f"e{index}") for index in range(problem.stages))
        problem = PartitionProblem(graph=drawn.graph, devices=devices, links=drawn.links, cost_model=model)
    ranks = len({device.name for device in problem.devices})
    actions = make_schedule(schedule, ranks=ranks, stages=problem.stages, microbatches=model.microbatches)
    assert isinstance(problem.links, LinkSpec)
    link = problem.links
    for _, placed in itertools.islice(contiguous_placements(problem), 4):
        figures = measured(problem, placed)

        def duration(action: Action, made: Figures = figures) -> float:
            borders = (0.0, *(made.cut_forward_us if action.kind == "F" else made.cut_backward_us), 0.0)
            slower_us = slowed * sum(borders[action.stage : action.stage + 2]) if action.kind != "I" else 0.0
            return expected_us(made.times_us)(action) + slower_us

        def transfer(action: Action, made: Figures = figures) -> float:
            onward = action.kind == "F"
            sizes = made.cut_forward_bytes if onward else made.cut_backward_bytes
            return link.transfer_us(sizes[action.stage if onward else action.stage - 1])

        tasks = tasks_of(actions)
        tasks = in_turn(tasks, expected_us()) if model.transfers_in_turn else tasks
        step_us = max(event.end_us for event in events_of(tasks, duration, transfer))
        assert figures.step.step_us == pytest.approx(step_us)
        assert figures.device_memory_bytes == held_along(problem, placed, actions.ranks)
        alone = [
            tuple(one for one in actions.ranks[actions.rank_of[stage]] if one.stage == stage)
            for stage in range(problem.stages)
        ]
        assert figures.stage_memory_bytes == held_along(problem, placed, tuple(alone))
        assert sum(figures.device_time_us) == pytest.approx(sum(figures.stage_time_us))


@pytest.mark.parametrize("schedule", SCHEDULES)
@exhaustive
@given(data=st.data())
def test_matrices_say_what_every_contiguous_stage_takes(schedule: str, data: st.DataObject) -> None:
    """Also of microbatches that are half done, as arrays and one by one; the partitions' own figures agree."""
    problem = data.draw(shared_problems(schedule))
    step = problem.step_on(problem.devices)
    matrices = stage_matrices(
        UnitSequence(problem.units), np.arange(len(problem.units) + 1), replace(problem.cost_model, relief=KEEP_ALL)
    )
    for inner, placed in itertools.islice(contiguous_placements(problem), 10):
        marks = [0, *inner, len(problem.units)]
        figures = measured(problem, placed)
        for stage, at in enumerate(itertools.pairwise(marks)):
            held, kept, left, most = bytes_of_microbatch(problem, placed, stage)
            assert matrices.held_bytes[at] == held
            if schedule == "zero_bubble":
                assert (matrices.kept_bytes[at], matrices.held_bytes[at] - matrices.freed_bytes[at]) == (kept, left)
                coming = on_the_way(problem, placed, stage)
                assert matrices.kept_bytes[at] + matrices.input_transient_bytes[at] == most + coming
            else:
                assert matrices.kept_bytes[at] == matrices.freed_bytes[at] == 0
                alone = matrices.static_bytes[at] + step.in_flight[stage] * held + matrices.transient_bytes[at]
                assert figures.stage_memory_bytes[stage] == math.ceil(alone)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("schedule", SCHEDULES)
@exhaustive
@given(data=st.data())
def test_buckets_are_reduced_one_by_one_as_they_become_final(schedule: str, overlap: bool, data: st.DataObject) -> None:
    """The end of a step, against a link for each device that takes one bucket after the other."""
    drawn = data.draw(shared_problems(schedule))
    model = replace(
        drawn.cost_model,
        optimizer_offload=None,
        overlap_communication=overlap,
        transfer_share=0.0,
        transfers_in_turn=False,
    )
    problem = replace(drawn, cost_model=model)
    actions = problem.step_on(problem.devices).schedule
    assert isinstance(problem.links, LinkSpec)
    link = problem.links
    for _, placed in itertools.islice(contiguous_placements(problem), 4):
        figures = measured(problem, placed)

        def duration(action: Action, made: Figures = figures) -> float:
            return expected_us(made.times_us)(action)

        def transfer(action: Action, made: Figures = figures) -> float:
            onward = action.kind == "F"
            sizes = made.cut_forward_bytes if onward else made.cut_backward_bytes
            return link.transfer_us(sizes[action.stage if onward else action.stage - 1])

        events = simulate(actions, duration, transfer, overlap=overlap)
        of_ranks = [[one for one in events if one.rank == rank] for rank in range(len(actions.ranks))]
        ends_us = [buckets_end(problem, placed, own) for own in of_ranks]
        assert figures.step.step_us == pytest.approx(max(ends_us))


def buckets_end(problem: PartitionProblem, placed: np.ndarray, events: list[Event]) -> float:
    """When a rank has done its actions, its link has reduced all buckets, and the optimizer has made its step."""
    model, copies = problem.cost_model, problem.cost_model.data_parallel
    done_us = max(event.end_us for event in events)
    last = {event.action.stage: event for event in events}  # the later ones stay
    link_us = steps_us = 0.0
    for stage, event in sorted(last.items(), key=lambda one: one[1].end_us):
        units = [unit for unit in range(len(problem.units)) if placed[unit] == stage]
        names = {name for unit in units for name in problem.units.parameters[unit]}
        nbytes = sum(model.gradient_bytes(problem.graph)[name] for name in names)
        steps_us += (
            sum((problem.graph.optimizer_us or {}).get(name, 0.0) for name in names) / problem.devices[stage].speed
        )
        count = max(1, math.ceil(nbytes / copies.bucket_bytes))
        begin_us = event.start_us if event.action.kind == "B" else event.end_us
        for bucket in range(1, count + 1):
            final_us = begin_us + (event.end_us - begin_us) * bucket / count if model.overlap_communication else done_us
            turns = 2 * (copies.ranks - 1)
            link_us = max(link_us, final_us) + turns * copies.link.transfer_us(nbytes / count / copies.ranks)
    return max(done_us, link_us) + steps_us


def held_along(problem: PartitionProblem, placed: np.ndarray, ranks: tuple[tuple[Action, ...], ...]) -> tuple[int, ...]:
    """The peak of each rank, action by action and microbatch by microbatch."""
    costs, static, transient = problem.cost_model.parameter_cost_bytes(problem.graph), [], []
    for stage in range(problem.stages):
        units = [unit for unit in range(len(problem.units)) if placed[unit] == stage]
        transient.append(max(float(problem.units.transient_bytes[unit]) for unit in units))
        static.append(sum(costs[name] for name in {name for unit in units for name in problem.units.parameters[unit]}))
    return tuple(
        math.ceil(sum(static[stage] for stage in {one.stage for one in actions}) + peak - 1e-6)
        for actions, peak in ((actions, peak_along(problem, placed, actions, transient)) for actions in ranks)
    )


def test_outputs_besides_the_loss_are_held_by_who_needs_them() -> None:
    """The last stage's logits: until the backward only where somebody has them."""
    nodes = (
        CostNode(name="x", kind="placeholder", output_bytes=5),
        CostNode(name="body", inputs=("x",), output_bytes=7, gradient_bytes=7),
        CostNode(name="logits", inputs=("body",), output_bytes=100, gradient_bytes=100, output_storages=("logits",)),
        CostNode(name="loss", inputs=("logits",), output_bytes=1, gradient_bytes=1),
        CostNode(name="output", kind="output", inputs=("loss", "logits")),
    )
    devices = (DeviceSpec(name="d0"), DeviceSpec(name="d1"))

    def held(outputs_stay: bool) -> tuple[int, ...]:
        model = CostModel(microbatches=4, outputs_stay=outputs_stay)
        problem = PartitionProblem(graph=CostGraph(nodes=nodes), devices=devices, cost_model=model)
        return measured(problem, np.array([0, 1, 1])).stage_memory_bytes

    staying, gone = held(True), held(False)
    assert staying[0] == gone[0]
    assert staying[1] - gone[1] == 100 + 1


def two_devices_in_turn(cap: int | None = None) -> tuple[DeviceSpec, ...]:
    return tuple(DeviceSpec(name=f"cuda:{stage % 2}", memory_cap_bytes=cap) for stage in range(4))


@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
def test_two_stages_of_a_device_share_its_memory(schedule: str) -> None:
    """A cap under which each stage alone has room, but not two together, is refused."""
    graph = chain([1.0] * 8)
    model = CostModel(schedule=schedule, microbatches=4, memory_buffer=0.0)

    def problem(cap: int | None) -> PartitionProblem:
        return PartitionProblem(graph=graph, devices=two_devices_in_turn(cap), cost_model=model)

    free = partition(problem(None), "uniform")
    least = least_caps(problem(1)).caps[0]
    assert least is not None
    tight = partition(problem(least))
    assert max(tight.device_memory_bytes) == least
    assert max(tight.stage_memory_bytes) < least - 1
    with pytest.raises(PartitionError, match=f"found none; the least cap that works for every device is {least} bytes"):
        partition(problem(least - 1))
    with pytest.raises(PartitionError, match=r"found stages 0, 2 of algorithm 'uniform' with .* where cuda:0 has"):
        partition(problem(free.device_memory_bytes[0] - 1), "uniform")


def test_stages_of_one_device_take_turns_and_send_nothing() -> None:
    device = DeviceSpec(name="cpu")
    slow = LinkSpec(bytes_per_us=0.001)
    model = CostModel(schedule="1f1b", microbatches=3)
    made = partition(PartitionProblem(graph=chain([6.0] * 4), devices=(device,) * 2, links=slow, cost_model=model))
    assert made.step_us == 3 * 24
    assert made.bubble == 0
    assert made.figures.device_time_us == (24.0,)


def test_zero_bubble_has_a_shorter_step_than_1f1b() -> None:
    def step_us(schedule: str) -> float:
        devices = tuple(DeviceSpec(name=f"d{index}") for index in range(4))
        model = CostModel(schedule=schedule, microbatches=8)
        return partition(PartitionProblem(graph=chain([6.0] * 4), devices=devices, cost_model=model)).step_us

    assert step_us("zero_bubble") < step_us("1f1b") == (8 + 3) * 6


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 8), (4, 8), (5, 2)])
def test_a_device_rests_in_the_bubble_of_equal_stages(stages: int, microbatches: int) -> None:
    def rest_share(schedule: str, chunks: int) -> float:
        model = CostModel(schedule=schedule, microbatches=microbatches)
        return TrainingStep.of([f"d{index}" for index in range(stages)] * chunks, model).rest_share(model)

    expected = (stages - 1) / (microbatches + stages - 1)
    assert rest_share("gpipe", 1) == pytest.approx(expected)
    assert rest_share("1f1b", 1) == pytest.approx(expected)
    if stages > 1 and microbatches % stages == 0:
        assert rest_share("interleaved", 2) == pytest.approx((stages - 1) / (2 * microbatches + stages - 1))
        assert rest_share("zero_bubble", 2) < expected


@pytest.mark.parametrize(
    ("devices", "model", "message"),
    [
        ("aabb", {"schedule": "interleaved"}, r"devices in turn .* stage s on device s % 2, found .* 0, 0, 1, 1"),
        ("aba", {"schedule": "zero_bubble"}, "stages that the ranks divide, found 3 stages on 2 ranks"),
        ("abcd", {"schedule": "interleaved", "microbatches": 9}, "multiple of the 4 ranks"),
    ],
)
def test_devices_and_microbatches_that_a_schedule_does_not_take_are_refused(
    devices: str, model: dict[str, object], message: str
) -> None:
    with pytest.raises(PartitionError, match=message):
        PartitionProblem(
            graph=chain([1.0] * 8),
            devices=tuple(DeviceSpec(name=name) for name in devices),
            cost_model=CostModel(**model),  # type: ignore[arg-type]
        )


def test_one_name_is_one_device() -> None:
    devices = (DeviceSpec(name="a", memory_cap_bytes=5), DeviceSpec(name="a", memory_cap_bytes=6))
    with pytest.raises(PartitionError, match="expected one description of a"):
        PartitionProblem(graph=chain([1.0] * 2), devices=devices)


@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
def test_devices_in_turn_are_reordered_in_turn(schedule: str) -> None:
    slow, fast = DeviceSpec(name="slow"), DeviceSpec(name="fast", speed=20.0)
    problem = PartitionProblem(
        graph=chain([20.0, 1.0, 20.0, 1.0]),
        devices=(slow, fast, slow, fast),
        cost_model=CostModel(schedule=schedule, microbatches=4),
        reorder_devices=True,
    )
    assert partition(problem).devices == ("fast", "slow", "fast", "slow")


def ended(
    overlap: bool = True, optimizer_us: Mapping[str, float] | None = None, **model: object
) -> tuple[float, Figures]:
    """One node of 3 us forward and 6 us backward in each of two stages; 100 and 400 bytes of parameters."""
    nodes = (
        CostNode(name="a", forward_us=3.0, backward_us=6.0, parameters=("v",)),
        CostNode(name="b", forward_us=3.0, backward_us=6.0, parameters=("w", "frozen"), inputs=("a",)),
    )
    graph = CostGraph(
        nodes=nodes,
        parameter_bytes={"v": 100, "w": 400, "frozen": 1000},
        trainable=frozenset({"v", "w"}),
        optimizer_us=optimizer_us,
    )
    problem = PartitionProblem(
        graph=graph,
        devices=(DeviceSpec(name="d0"), DeviceSpec(name="d1")),
        cost_model=CostModel(microbatches=2, overlap_communication=overlap, **model),  # type: ignore[arg-type]
    )
    made = measured(problem, np.array([0, 1]))
    return made.step.step_us, made


@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_are_summed_after_the_last_backward(overlap: bool) -> None:
    """The second stage ends at 21 us, the first at 27; the ring sends 6 messages of a quarter of the gradients."""
    copies = DataParallel(ranks=4, link=LinkSpec(bytes_per_us=10.0, latency_us=1.0))
    assert ended(overlap)[0] == 27
    first, second = 27 + 6 * (1 + 25 / 10), 21 + 6 * (1 + 100 / 10)
    assert ended(overlap, data_parallel=copies)[0] == max(first, second) == second
    assert ended(overlap, data_parallel=DataParallel(ranks=1, link=LinkSpec(bytes_per_us=0.1)))[0] == 27


@pytest.mark.parametrize(
    ("rate", "step_us"),
    [
        (50.0, 27 + 2 / 4),  # the first stage's 100 bytes, faster than its backward: the last bucket comes after it
        (10.0, 15 + 6 / 16 + 40),  # the second one's 400, slower than its backward from 15 to 21: all follow the first
    ],
)
def test_all_but_a_bucket_is_summed_within_the_last_backward(rate: float, step_us: float) -> None:
    copies = DataParallel(ranks=2, link=LinkSpec(bytes_per_us=rate), bucket_bytes=25)
    assert ended(data_parallel=copies)[0] == step_us


def test_optimizer_state_on_the_host_takes_time_and_no_memory() -> None:
    there, with_state = ended()
    host = LinkSpec(bytes_per_us=100.0)
    step_us, without = ended(optimizer_offload=host)
    assert there == 27
    assert step_us == max(27 + 2 * 200 / 100, 21 + 2 * 800 / 100)  # two states for each parameter, in and out
    saved = [one - other for one, other in zip(with_state.stage_memory_bytes, without.stage_memory_bytes, strict=True)]
    assert saved == [200, 800]
    assert without.device_memory_bytes == (200, 2 * 400 + 1000)
    copies = DataParallel(ranks=2, link=LinkSpec(bytes_per_us=10.0))
    both, _ = ended(optimizer_offload=host, data_parallel=copies)
    assert both == 21 + 2 * 200 / 10 + 2 * 800 / 100  # one after the other


def test_the_optimizer_steps_where_each_device_is_done() -> None:
    optimizer_us, host = {"v": 6.0, "w": 4.0}, LinkSpec(bytes_per_us=100.0)
    assert ended(optimizer_us=optimizer_us)[0] == max(27 + 6, 21 + 4)
    assert ended(optimizer_us=optimizer_us, optimizer_offload=host)[0] == max(27 + 6 + 4, 21 + 4 + 16)
    assert ended(optimizer_us={"w": 40.0})[0] == 21 + 40


def test_gradients_of_one_stage_are_summed_while_the_device_computes_for_another() -> None:
    """GPipe on one device: stage 1's last backward ends before stage 0's, which its all-reduce runs beside."""
    nodes = (
        CostNode(name="a", forward_us=1.0, backward_us=4.0),
        CostNode(name="b", forward_us=1.0, backward_us=1.0, parameters=("w",), inputs=("a",)),
    )
    graph = CostGraph(nodes=nodes, parameter_bytes={"w": 60})
    device = DeviceSpec(name="d")
    copies = DataParallel(ranks=2, link=LinkSpec(bytes_per_us=20.0))

    def step_us(overlap: bool) -> float:
        model = CostModel(schedule="gpipe", microbatches=1, data_parallel=copies, overlap_communication=overlap)
        problem = PartitionProblem(graph=graph, devices=(device, device), cost_model=model)
        return measured(problem, np.array([0, 1])).step.step_us

    assert step_us(True) == 1 + 1 + 1 + 4
    assert step_us(False) == 1 + 1 + 1 + 4 + 3
