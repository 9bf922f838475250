"""What stages give up: which segments there are, what they cost, and that a search counts as a partition does."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.partition.random_graphs import contiguous_placements, make_graph, measured, problems
from torch_lms.errors import PartitionError
from torch_lms.partition import (
    CostGraph,
    CostModel,
    CostNode,
    DataParallel,
    DeviceSpec,
    LinkSpec,
    Partition,
    PartitionProblem,
    RecomputeAndSwap,
    figures,
    find_algorithm,
    intervals,
    least_caps,
    partition,
)
from torch_lms.partition.cut_table import CutTable
from torch_lms.partition.interface import evaluate, settle
from torch_lms.partition.offers import Offers, Segment
from torch_lms.partition.segments import RUNS, find_segments, offers_in
from torch_lms.partition.sequence import UnitSequence
from torch_lms.partition.units import Units

HOST = LinkSpec(bytes_per_us=100.0)
COPIES = DataParallel(ranks=2, link=LinkSpec(bytes_per_us=20.0), bucket_bytes=40)
SWAPS_LAST = RecomputeAndSwap(host_link=HOST, swap_last=True)
RELIEFS = [
    RecomputeAndSwap(),
    RecomputeAndSwap(host_link=HOST),
    SWAPS_LAST,
    RecomputeAndSwap(host_link=HOST, recompute=False),
]


def chain(blocks: int, saved_bytes: int = 300, given_bytes: int = 10, **options: object) -> CostGraph:
    """Blocks of three nodes that save much inside and give little to the next."""
    nodes = [CostNode(name="x", kind="placeholder", output_bytes=10)]
    storages = {}
    for block in range(blocks):
        for part, name in enumerate("abc"):
            storages[f"{name}{block}"] = saved_bytes
            nodes.append(
                CostNode(
                    name=f"{name}{block}",
                    inputs=(nodes[-1].name,),
                    forward_us=10.0,
                    backward_us=20.0,
                    output_bytes=given_bytes if part == 2 else 400,
                    saved=(f"{name}{block}",),
                )
            )
    return CostGraph(nodes=tuple(nodes), storage_bytes=storages, **options)  # type: ignore[arg-type]


def problem(graph: CostGraph, cap: int | None, relief: RecomputeAndSwap, stages: int = 2) -> PartitionProblem:
    devices = tuple(DeviceSpec(name=f"d{index}", memory_cap_bytes=cap) for index in range(stages))
    cost = CostModel(relief=relief, memory_buffer=0, schedule="gpipe", microbatches=4)
    return PartitionProblem(graph=graph, devices=devices, cost_model=cost)


def made(cap: int | None, relief: RecomputeAndSwap) -> Partition:
    return partition(problem(chain(8), cap, relief), "dp")


# --- segments -------------------------------------------------------------------------------------------------------


def test_segments_lie_between_narrow_borders() -> None:
    found = find_segments(Units(chain(8)))
    assert [one.names for one in found] == [(f"a{block}", f"b{block}", f"c{block}") for block in range(8)]
    assert {one.saved_bytes for one in found} == {900}
    assert {one.entering_bytes for one in found[1:]} == {10}
    assert found[0].entering_bytes == 0  # the model's input is there anyway


def pairs(last_saves: tuple[str, ...]) -> CostGraph:
    """Blocks of two nodes: ``a`` saves what it gives to ``b``, which saves that, and perhaps more."""
    nodes = [CostNode(name="x", kind="placeholder", output_bytes=10, output_storages=("x",))]
    storages = {"x": 10}
    for block in range(4):
        a, b = f"a{block}", f"b{block}"
        own = tuple(f"{b}{name}" for name in last_saves)
        storages |= dict.fromkeys((a, b, *own), 300)
        before = nodes[-1].name
        nodes += [
            CostNode(name=a, inputs=(before,), forward_us=10.0, output_bytes=400, output_storages=(a,), saved=(a,)),
            CostNode(name=b, inputs=(a,), forward_us=5.0, output_bytes=10, output_storages=(b,), saved=(a, *own)),
        ]
    return CostGraph(nodes=tuple(nodes), storage_bytes=storages)


@pytest.mark.parametrize(
    ("last_saves", "again_us"),
    [
        ((), 10.0),  # what comes in is saved before it runs
        (("",), 15.0),  # its output
        ((".inner",), 15.0),  # what it makes inside, as a whole module does
    ],
)
def test_the_last_node_runs_again_if_it_saves_more_than_came_in(last_saves: tuple[str, ...], again_us: float) -> None:
    found = find_segments(Units(pairs(last_saves)))
    assert [one.names for one in found] == [(f"a{block}", f"b{block}") for block in range(4)]
    assert {one.again_us for one in found} == {again_us}


@given(st.integers(0, 10_000), st.integers(2, 60), st.sampled_from([1, *RUNS]))
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_segments_are_runs_of_the_graph_that_do_not_overlap(seed: int, nodes: int, length: int) -> None:
    graph = make_graph(seed, nodes)
    units = Units(graph)
    active = [node.name for node in graph.nodes if not node.passive]
    seen: set[str] = set()
    saved = {node.name: set(node.saved) for node in graph.nodes}
    for one in offers_in(units, np.zeros(len(units), dtype=np.int64), 0, length).segments:
        first = active.index(one.names[0])
        assert tuple(active[first : first + len(one.names)]) == one.names
        assert seen.isdisjoint(one.names)
        seen.update(one.names)
        others = set().union(*(saved[name] for name in active if name not in one.names))
        own = set().union(*(saved[name] for name in one.names)) - others
        assert 0 < one.saved_bytes <= sum(graph.storage_bytes[id_] for id_ in own)


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({"c3": {"writes": ("a3",)}}, set()),
        ({"c3": {"writes": ("a2",)}}, {2, 3}),
        ({"c3": {"writes": ("x",)}}, {3}),
        ({"c3": {"writes": ("layer.running_mean",)}}, {3}),
        ({"c3": {"writes": ("a3",), "not_before": ("b1",)}}, {1, 3}),
        ({"c3": {"writes": ("a3",)}, "b5": {"not_before": ("c3",)}}, {3, 5}),
    ],
)
def test_what_a_change_of_memory_ties_together_is_not_computed_again(
    change: dict[str, dict[str, tuple[str, ...]]], refused: set[int]
) -> None:
    graph = chain(8)
    nodes = tuple(replace(node, **change.get(node.name, {})) for node in graph.nodes)  # type: ignore[arg-type]
    found = find_segments(Units(replace(graph, nodes=nodes)))
    assert {block for block, one in enumerate(found) if not one.recomputable} == refused


def test_a_run_of_segments_gives_up_what_lies_between_them() -> None:
    runs = [one for one in find_segments(Units(chain(4, given_bytes=50)), 2) if one.parts == 2]
    assert [one.names for one in runs] == [tuple(f"{x}{y}" for y in (y, y + 1) for x in "abc") for y in range(3)]
    assert [(one.saved_bytes, one.entering_bytes) for one in runs] == [(1800, 0), (1800, 50), (1800, 50)]


def test_what_a_change_of_memory_ties_together_is_computed_again_as_one_run() -> None:
    graph = chain(4)
    nodes = tuple(replace(node, writes=("a2",)) if node.name == "c3" else node for node in graph.nodes)
    found = find_segments(Units(replace(graph, nodes=nodes)), 2)
    assert {(one.part, one.parts) for one in found if not one.recomputable} == {(2, 1), (3, 1), (1, 2)}


@given(st.integers(1, 4), st.lists(st.integers(1, 5), min_size=1, max_size=12), st.data())
def test_a_stage_has_runs_one_after_the_other_and_then_single_parts(
    length: int, sizes: list[int], data: st.DataObject
) -> None:
    ends = np.cumsum(sizes)
    parts = [(part, count) for part in range(len(sizes)) for count in sorted({1, length}) if part + count <= len(sizes)]
    segments = tuple(
        Segment(names=(), units=(), again_us=0, saved_bytes=1, entering_bytes=0, recomputable=True, part=one, parts=n)
        for one, n in parts
    )
    offers = Offers(
        segments=segments,
        first=np.array([ends[one] - sizes[one] for one, _ in parts]),
        end=np.array([ends[one + n - 1] for one, n in parts]),
        length=length,
    )
    cuts = sorted(data.draw(st.tuples(*[st.integers(0, int(ends[-1]))] * 2)))
    inside = [part for part in range(len(sizes)) if cuts[0] <= ends[part] - sizes[part] and ends[part] <= cuts[1]]
    found = offers.within(*cuts).segments
    assert [part for one in found for part in range(one.part, one.part + one.parts)] == inside
    singles = len(inside) % length if length > 1 else len(inside)
    assert [one.parts for one in found] == [length] * (len(inside) // length) * (length > 1) + [1] * singles
    arrays = [np.full(3, cut) for cut in cuts]
    assert [bool(one.all()) for one in offers.of(*arrays)] == [one in found for one in segments]


# --- costs ----------------------------------------------------------------------------------------------------------


def test_swaps_that_are_allowed_never_make_a_stage_larger_or_slower() -> None:
    worse = 0
    for cap in range(1_000, 16_000, 100):
        found = []
        for relief in (RecomputeAndSwap(), RecomputeAndSwap(host_link=HOST)):
            try:
                found.append(made(cap, relief).step_us)
            except PartitionError:
                found.append(math.inf)
        assert found[1] <= found[0]
        worse += found[1] < found[0]
    assert worse


def half_recomputable() -> CostGraph:
    """Every other block keeps statistics of what it was given."""
    graph = chain(8)
    odd = {f"c{block}" for block in range(1, 8, 2)}
    nodes = [replace(node, writes=("layer.running_mean",)) if node.name in odd else node for node in graph.nodes]
    return replace(graph, nodes=tuple(nodes))


def test_where_computing_again_is_enough_nothing_is_swapped_if_swaps_come_last() -> None:
    graph = half_recomputable()
    cap = int(max(made(None, RecomputeAndSwap()).stage_memory_bytes) * 0.75)
    tight = {
        relief: problem(graph, cap, relief)
        for relief in (RecomputeAndSwap(), RecomputeAndSwap(host_link=HOST), SWAPS_LAST)
    }
    alone, first, last = (find_algorithm("dp").partition(one) for one in tight.values())
    assert first.step_us < alone.step_us
    assert last == alone
    alone, first, last = (partition(one, "dp") for one in tight.values())
    assert any(one.swapped for one in first.stage_relief)
    assert any(one.recomputed for one in last.stage_relief)
    assert last == alone


def test_where_computing_again_is_not_enough_swaps_that_come_last_are_used() -> None:
    graph = half_recomputable()
    cap = int(max(made(None, RecomputeAndSwap()).stage_memory_bytes) * 0.4)
    for partitioned in (find_algorithm("dp").partition, lambda one: partition(one, "dp")):
        with pytest.raises(PartitionError, match="found none"):
            partitioned(problem(graph, cap, RecomputeAndSwap()))
        assert partitioned(problem(graph, cap, SWAPS_LAST)).fits
    assert any(one.swapped for one in partition(problem(graph, cap, SWAPS_LAST), "dp").stage_relief)


def test_runs_make_stages_fit_that_segments_alone_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = chain(8, given_bytes=150)
    with_runs = least_caps(problem(graph, 1_000, RecomputeAndSwap())).factor * 1_000
    found = partition(problem(graph, math.ceil(with_runs), RecomputeAndSwap()), "dp")
    assert 6 in {len(names) for one in found.stage_relief for names in one.recomputed}
    for module in (figures, intervals):
        monkeypatch.setattr(module, "RUNS", ())
    assert least_caps(problem(graph, 1_000, RecomputeAndSwap())).factor * 1_000 > 1.02 * with_runs
    with pytest.raises(PartitionError, match="least cap"):
        partition(problem(graph, math.ceil(with_runs), RecomputeAndSwap()), "dp")


def test_a_stage_that_fits_keeps_all() -> None:
    plain = made(None, RecomputeAndSwap())
    assert not plain.stage_relief
    tight = made(max(plain.stage_memory_bytes), RecomputeAndSwap())
    assert tight.stage_of == plain.stage_of
    assert replace(tight.figures, usable_bytes=()) == replace(plain.figures, usable_bytes=())


def test_computing_again_takes_the_forward_once_more() -> None:
    plain = made(None, RecomputeAndSwap())
    found = made(min(plain.stage_memory_bytes) - 1, RecomputeAndSwap())
    assert [len(one.recomputed) for one in found.stage_relief] == [1, 1]
    for stage, entering in enumerate((0, 10)):  # the model's input is there anyway
        assert found.stage_time_us[stage] == plain.stage_time_us[stage] + 30
        given = 4 * (900 - entering)  # when it is there again the segments behind it are gone
        assert found.stage_memory_bytes[stage] == plain.stage_memory_bytes[stage] - given


def test_swaps_that_hide_behind_compute_are_free_and_come_first() -> None:
    plain = made(None, RecomputeAndSwap())
    cap = int(max(plain.stage_memory_bytes) * 0.75)
    found = made(cap, RecomputeAndSwap(host_link=HOST))
    assert all(one.swapped and not one.recomputed for one in found.stage_relief)
    assert found.step_us == plain.step_us + 2 * 9  # each stage's first backward has nothing before it that asks
    slow = RecomputeAndSwap(host_link=LinkSpec(bytes_per_us=1.0))
    again = made(cap, slow)
    assert all(one.recomputed and not one.swapped for one in again.stage_relief)
    with pytest.raises(PartitionError, match="found none"):  # copies out would take more room than they give
        made(cap, replace(slow, recompute=False))


def test_swaps_that_would_not_end_in_time_are_refused() -> None:
    """What is estimated, as copies that hide in all, may come too late for what runs meanwhile."""
    graph = chain(4)
    late = replace(graph, storage_bytes={name: 900 if name[1] == "3" else 100 for name in graph.storage_bytes})
    relief = RecomputeAndSwap(host_link=LinkSpec(bytes_per_us=30.0), recompute=False)
    tight = problem(late, 3_500, relief, stages=1)
    assert find_algorithm("dp").partition(tight).fits
    for algorithm in ("dp", "auto"):
        with pytest.raises(PartitionError, match=r"4040 bytes .* frees too little in time: let segments be computed"):
            partition(tight, algorithm)
    roomy = problem(late, 4_040, relief, stages=1)
    assert partition(roomy, "dp").stage_memory_bytes == (4_040,)


@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
def test_what_is_estimated_to_fit_fits_where_devices_have_several_stages(schedule: str) -> None:
    """Zero bubble has all of a microbatch back from its backward of inputs to that of weights."""
    fast = LinkSpec(bytes_per_us=1e6)
    tried = 0
    for relief in (RecomputeAndSwap(), RecomputeAndSwap(host_link=fast, recompute=False)):
        for cap in range(4_000, 26_000, 2_000):
            four = problem(chain(16), cap, relief, stages=4)
            devices = (*four.devices[:2], *four.devices[:2])
            tight = replace(four, devices=devices, cost_model=replace(four.cost_model, schedule=schedule))
            try:
                estimated = find_algorithm("dp").partition(tight)
            except PartitionError:
                continue
            assert settle(tight, estimated).fits
            tried += bool(settle(tight, estimated).stage_relief)
    assert tried > 1


@given(problem=problems(largest=9, stages=3, schedules=("1f1b", "gpipe")), share=st.floats(0.3, 1.0))
@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.too_slow])
def test_what_is_estimated_to_fit_by_computing_again_fits_in_no_more_time(
    problem: PartitionProblem, share: float
) -> None:
    plain = evaluate(problem, next(contiguous_placements(problem))[1], algorithm="", reason="")
    cap = max(int(max(plain.device_memory_bytes) * share), 1)
    devices = tuple(replace(one, memory_cap_bytes=cap) for one in problem.devices)
    tight = replace(
        problem, devices=devices, cost_model=replace(problem.cost_model, relief=RecomputeAndSwap(), memory_buffer=0)
    )
    for _, placed in contiguous_placements(problem):
        estimated = evaluate(tight, placed, algorithm="", reason="")
        found = settle(tight, estimated)
        assert math.isclose(found.step_us, estimated.step_us, rel_tol=1e-9) or found.stage_relief or estimated.fits
        if estimated.fits:
            assert found.fits
            assert found.step_us <= estimated.step_us * (1 + 1e-9)


@given(problem=problems(largest=9, stages=3), relief=st.sampled_from(RELIEFS), share=st.floats(0.3, 1.0))
@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.too_slow])
def test_a_search_counts_as_a_partition_does(problem: PartitionProblem, relief: RecomputeAndSwap, share: float) -> None:
    """Whatever is given up: no stage takes longer or less, and none that fits is changed."""
    placements = list(contiguous_placements(problem))
    caps = [max(int(max(measured(problem, placements[0][1]).device_memory_bytes) * share), 1)] * problem.stages
    devices = tuple(replace(one, memory_cap_bytes=cap) for one, cap in zip(problem.devices, caps, strict=True))
    model = replace(problem.cost_model, data_parallel=COPIES)
    plain = replace(problem, devices=devices, cost_model=model)
    tight = replace(plain, cost_model=replace(model, relief=relief))
    end = len(problem.units)
    cuts = np.arange(end + 1)
    sequence = UnitSequence(problem.units)
    table = CutTable(sequence, devices, tight.links_between(devices), tight.cost_model, cuts)
    marks = np.array([[0, *inner, end] for inner, _ in placements], dtype=np.int64)
    rows, shares = table.rows(marks)
    times, fitting = table.step.times_us(rows), []
    for index, (_, placed) in enumerate(placements):
        before, after = measured(plain, placed), measured(tight, placed)
        assert math.isclose(after.step.step_us, times[index], rel_tol=1e-9, abs_tol=1e-9)
        need = max(have / usable for have, usable in zip(after.device_memory_bytes, after.usable_bytes, strict=True))
        assert math.isclose(need, shares[index], rel_tol=1e-6)
        assert all(b <= a for a, b in zip(before.device_memory_bytes, after.device_memory_bytes, strict=True))
        assert all(b >= a for a, b in zip(before.stage_time_us, after.stage_time_us, strict=True))
        if before.fits:
            assert after == before
        if after.fits:
            fitting.append(index)
    for index in fitting:  # no sum along a step's longest path is longer than another step
        _, passes = table.step.path(rows[:, :, index])
        assert table.lowest(passes).cost_us <= min(times[fitting]) * (1 + 1e-9)


@pytest.mark.parametrize("relief", RELIEFS)
@pytest.mark.parametrize("algorithm", ["dp", "auto", "dawnpiper"])
def test_stages_that_no_plain_cut_fits_get_along(algorithm: str, relief: RecomputeAndSwap) -> None:
    graph = chain(12)
    least = partition(problem(graph, None, relief, stages=3), "dp")
    cap = int(max(least.stage_memory_bytes) * 0.6)
    found = partition(problem(graph, cap, relief, stages=3), algorithm)
    assert found.fits
    assert found.stage_relief
    assert "by an estimate of what stages give up" in found.reason
    assert max(found.stage_memory_bytes) <= cap
