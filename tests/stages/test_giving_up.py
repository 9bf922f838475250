"""Stages that give segments up until their backward: the same bits, less memory, nothing lost."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch.nn import functional

from tests.partition.random_writes import ROWS, WIDTH, assert_same, outcome, problem_of, random_writes
from torch_lms import balanced
from torch_lms._torch_compat import storage_bytes, storage_key
from torch_lms.balanced import BalanceConfig, create_balanced_partition, plan_balanced_partition
from torch_lms.errors import PartitionError
from torch_lms.partition import CostGraph, CostModel, LinkSpec, Partition, RecomputeAndSwap, StageRelief
from torch_lms.partition.offers import Segment
from torch_lms.partition.segments import find_segments, offers_in
from torch_lms.partition.units import Units
from torch_lms.profile.profiler import ProfileConfig, profile
from torch_lms.profile.tracing import trace
from torch_lms.stages.cutting import split
from torch_lms.stages.giving_up import Swaps, _Swapped, can_swap
from torch_lms.stages.materialize import materialize
from torch_lms.stages.running import Stages, run_stages

HOST = LinkSpec(bytes_per_us=1e6)  # fast, so that times of a busy CPU do not matter
needs_core = pytest.mark.skipif(not can_swap(), reason="without the compiled core nothing is swapped")
KINDS = ["recomputed", pytest.param("swapped", marks=needs_core)]


class Block(nn.Module):
    """A residual block with dropout; its norm counts what it saw, if it is asked to."""

    def __init__(self, width: int, counts: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width) if counts else nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.narrow(functional.gelu(self.wide(self.norm(x)))))


def model_of(counts: bool = False, blocks: int = 6) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(Block(64, counts) for _ in range(blocks)), nn.Linear(64, 8))


X = torch.randn(512, 64, generator=torch.Generator().manual_seed(1))
Run = Callable[[nn.Module], list[torch.Tensor]]


def plainly(model: nn.Module) -> list[torch.Tensor]:
    loss = model(X).square().mean()
    loss.backward()
    return [loss.detach()]


def with_two_backwards(model: nn.Module) -> list[torch.Tensor]:
    loss = model(X).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return [loss.detach()]


def with_two_forwards_first(model: nn.Module) -> list[torch.Tensor]:
    losses = [model(X * scale).square().mean() for scale in (1.0, 2.0, 3.0)]
    for loss in losses:
        loss.backward()
    return [loss.detach() for loss in losses]


def with_gradients_of_gradients(model: nn.Module) -> list[torch.Tensor]:
    x = X.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
    slope.square().sum().backward()
    return [slope.detach(), x.grad]  # type: ignore[list-item]


def without_gradients(model: nn.Module) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(X)]


def under_autocast(model: nn.Module) -> list[torch.Tensor]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(X).float().square().mean()
    loss.backward()
    return [loss.detach()]


RUNS = [
    plainly,
    with_two_backwards,
    with_two_forwards_first,
    with_gradients_of_gradients,
    without_gradients,
    under_autocast,
]


def bits(run: Run, model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(5)
    results = run(model)
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    grads = [None if named[name].grad is None else named[name].grad.clone() for name in sorted(named)]
    return results + [one for one in grads if one is not None] + [named[name].detach() for name in sorted(named)]


@lru_cache
def planned(counts: bool, kind: str, share: float = 0.55) -> Partition:
    """Two stages on one device that has a share of what they need."""
    profiling = ProfileConfig(timed_runs=1, progress=False)

    def plan(cap: int | None, relief: RecomputeAndSwap) -> Partition:
        cost = CostModel(microbatches=4, schedule="gpipe", optimizer_multiplier=2, relief=relief)
        link = LinkSpec(bytes_per_us=1000.0)
        config = BalanceConfig(profile=profiling, links=link, cost=cost, memory_cap_bytes=cap)
        return plan_balanced_partition(model_of(counts), ["cpu", "cpu"], X, config=config).partition

    relief = RecomputeAndSwap(host_link=HOST if kind == "swapped" else None, recompute=kind == "recomputed")
    need = plan(None, relief)
    assert not need.stage_relief
    found = plan(int(need.device_memory_bytes[0] * share / 0.9), relief)
    assert found.fits
    assert any(getattr(one, kind) for one in found.stage_relief)
    return found


def relieved(kind: str, counts: bool = False) -> Stages:
    """A model as that partition cuts it."""
    model, found = model_of(counts), planned(counts, kind)
    stages = split(trace(model, (X,), {}), found.stage_of, model=model, relief=found.stage_relief)
    return Stages([materialize(stage, "cpu") for stage in stages], partition=found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run", RUNS)
def test_stages_that_give_segments_up_have_the_bits_of_the_model(run: Run, kind: str) -> None:
    if run in (with_gradients_of_gradients, under_autocast) and kind == "recomputed" and not hasattr(torch, "compiler"):
        pytest.skip("this PyTorch's checkpoints know no gradients of gradients, and forget autocast on the CPU")
    expected = bits(run, model_of())
    found = bits(run, relieved(kind))
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@needs_core
def test_what_counts_what_it_saw_is_swapped_but_not_computed_again() -> None:
    assert all(one.recomputable for one in segments(model_of()))
    counted = segments(model_of(counts=True))
    assert [one.recomputable for one in counted] == [not any("norm" in name for name in one.names) for one in counted]
    assert not all(one.recomputable for one in counted)
    expected = bits(plainly, model_of(counts=True))
    found = bits(plainly, relieved("swapped", counts=True))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def half_counting() -> nn.Module:
    """Every other block has a part that is not to be computed again."""
    torch.manual_seed(3)
    return nn.Sequential(*(Block(64, number % 2 == 0) for number in range(6)), nn.Linear(64, 8))


def balanced_stages(cap: int | None, relief: RecomputeAndSwap | None = None) -> Stages:
    """One stage; what it may give up is its maker's choice, unless it is said."""
    cost = CostModel(microbatches=4, schedule="gpipe", optimizer_multiplier=2)
    profiling = ProfileConfig(warmup_runs=0, timed_runs=1, links=False, progress=False)
    config = BalanceConfig(profile=profiling, cost=cost, memory_cap_bytes=cap, relief=relief)
    return create_balanced_partition(half_counting(), ["cpu"], X, config=config)


def given_up(stages: Stages) -> StageRelief:
    (found,) = stages.partition.stage_relief  # type: ignore[union-attr]
    return found


@needs_core
def test_a_balanced_partition_swaps_only_where_computing_again_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balanced, "_host_link", lambda profile: HOST)  # is not profiled on a CPU
    need_bytes = balanced_stages(None).partition.device_memory_bytes[0]  # type: ignore[union-attr]
    enough, too_little = (int(need_bytes * share / 0.9) for share in (0.75, 0.5))
    assert given_up(balanced_stages(enough, RecomputeAndSwap(host_link=HOST))).swapped  # else this cap tells nothing
    with pytest.raises(PartitionError, match="fit devices"):
        balanced_stages(too_little, RecomputeAndSwap())
    expected = bits(plainly, half_counting())
    for cap, swaps in ((enough, False), (too_little, True)):
        stages = balanced_stages(cap)
        assert bool(given_up(stages).swapped) == ("swaps.run(segment_" in stages[0].code) == swaps
        assert bool(given_up(stages).recomputed) or swaps
        found = bits(plainly, stages)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def segments(model: nn.Module) -> tuple[Segment, ...]:
    """As the planner sees them."""
    found = profile(trace(model, (X,), {}), X, config=ProfileConfig(timed_runs=1, progress=False))
    return find_segments(Units(CostGraph.from_profile(found)))


def saved_bytes(model: nn.Module) -> int:
    """What a forward keeps for its backward outside of what is computed again."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[storage_key(tensor)] = storage_bytes(tensor)
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(X).square().mean()  # lives until all that is kept was counted
    assert loss.isfinite()
    return sum(kept.values())


def test_what_is_computed_again_is_not_kept() -> None:
    stages = relieved("recomputed")
    assert saved_bytes(stages) < 0.6 * saved_bytes(model_of())


@pytest.mark.skipif(not hasattr(torch, "compiler"), reason="its checkpoints hold what comes in where no hook sees it")
def test_larger_runs_keep_less_and_have_the_same_bits() -> None:
    model = model_of(blocks=8)
    traced = trace(model, (X,), {})
    found = profile(traced, X, config=ProfileConfig(timed_runs=1, progress=False))
    units = Units(CostGraph.from_profile(found))
    computed = [node.name for node in found.nodes if node.op.startswith("call_")]
    expected = bits(plainly, model)
    kept = []
    for length in (1, 2, 4):
        offered = offers_in(units, np.zeros(len(units), dtype=np.int64), 0, length).segments
        relief = StageRelief(recomputed=tuple(one.names for one in offered))
        for parameter in model.parameters():
            parameter.grad = None
        stages = Stages(split(traced, dict.fromkeys(computed, 0), model=model, relief=[relief]))
        assert all(torch.equal(one, other) for one, other in zip(bits(plainly, stages), expected, strict=True))
        kept.append(saved_bytes(stages))
    block_bytes = X.numel() * X.element_size()
    assert kept[0] - kept[1] >= 3 * block_bytes
    assert kept[1] - kept[2] >= block_bytes


def test_segments_are_functions_of_their_own_that_can_be_read() -> None:
    stages = relieved("recomputed")
    relief = stages.partition.stage_relief  # type: ignore[union-attr]
    for stage, given_up in zip(stages, relief, strict=True):
        assert stage.code.count("def segment_") == len(given_up.recomputed)
        assert stage.code.count("recomputed(segment_") == len(given_up.recomputed)
        if not given_up:
            continue
        body = stage.code.partition("def segment_0(")[2].partition("\ndef ")[0]
        named = [name for name in given_up.recomputed[0] if f" {name} = " in body]
        assert len(named) == len(given_up.recomputed[0])


@pytest.mark.parametrize("kind", KINDS)
def test_stages_that_give_up_can_be_copied_and_pickled(kind: str) -> None:
    stages = relieved(kind)
    expected = bits(plainly, stages)
    stages.zero_grad()
    for again in (copy.deepcopy(stages), pickle.loads(pickle.dumps(stages))):
        found = bits(plainly, again)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_after_an_error_in_a_segment_the_next_step_is_as_ever(kind: str) -> None:
    expected = bits(plainly, model_of())
    stages = relieved(kind)
    with pytest.raises((RuntimeError, PartitionError)):
        stages(X[:, :3])
    loss = stages(X).square().mean()
    del loss  # a forward whose backward never comes
    with pytest.raises(ValueError, match="own"):
        with_failing_backward(stages)
    stages.zero_grad()
    found = bits(plainly, stages)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def with_failing_backward(model: nn.Module) -> None:
    def fail(grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("the program's own")

    x = X.clone().requires_grad_()
    x.register_hook(fail)
    model(x).square().mean().backward()


@needs_core
def test_what_a_swapped_segment_saved_leaves_the_device() -> None:
    import torch_lms

    stages = relieved("swapped")
    torch_lms.wait()
    before = torch_lms.stats()
    loss = stages(X).square().mean()
    torch_lms.wait()
    out = torch_lms.stats().pageout_bytes - before.pageout_bytes
    chosen = {names for one in stages.partition.stage_relief for names in one.swapped}  # type: ignore[union-attr]
    needs = [one.saved_bytes for one in segments(model_of()) if one.names in chosen]
    assert out >= 0.9 * sum(needs) > 0
    loss.backward()
    assert torch_lms.stats().pagein_bytes - before.pagein_bytes >= 0.9 * sum(needs)


def test_the_segment_that_comes_back_next_is_of_a_forward_whose_backward_has_not_begun() -> None:
    """Zero bubble keeps a graph until its backward of weights, while the next backward of inputs runs."""
    stage: Any = nn.Identity()  # any key will do
    first, second, third = forwards = [Swaps(stage) for _ in range(3)]
    for one in forwards:
        one.segments = [_Swapped(one), _Swapped(one)]
    for segment in first.segments:
        segment.begun = True
    assert second.next_after(second.segments[1]) is second.segments[0]
    assert second.next_after(second.segments[0]) is third.segments[1]


def test_a_segment_that_is_elsewhere_or_has_gaps_is_refused() -> None:
    program = fx.symbolic_trace(model_of(blocks=1))
    names = [node.name for node in program.graph.nodes if node.op.startswith("call_")]
    stage_of = {name: int(name == names[-1]) for name in names}
    for wrong, words in (
        (names[-1:], "expected the nodes of a segment in its stage"),
        (names[:3:2], "follow each other"),
    ):
        relief = StageRelief(recomputed=(tuple(wrong),))
        with pytest.raises(PartitionError, match=words):
            split(program, stage_of, relief=[relief, StageRelief()])


drawn = st.tuples(
    st.integers(0, 100_000),
    st.integers(4, 26),
    st.sampled_from(["recomputed", "swapped"]),
    st.sampled_from([1, 2, 4]),
)


@given(drawn)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
def test_programs_that_work_in_place_have_the_same_bits_with_all_that_may_be_given_up(drawn: Any) -> None:
    seed, nodes, kind, length = drawn
    assume(kind == "recomputed" or can_swap())
    program = random_writes(seed, nodes)
    generator = torch.Generator().manual_seed(seed)
    feeds = {name: torch.rand(ROWS, WIDTH, generator=generator) for name in ("x", "y")}
    model = copy.deepcopy(program)
    try:
        expected = outcome(
            lambda: fx.Interpreter(model).run(*(value.clone() for value in feeds.values())), list(model.parameters())
        )
    except RuntimeError:  # autograd refuses some changes of what it has saved
        assume(False)
    units = problem_of(program, 1, seed, saves=True).units
    offered = offers_in(units, np.zeros(len(units), dtype=np.int64), 0, length).segments
    every = [one.names for one in offered if one.recomputable or kind == "swapped"]
    assume(every)
    computed = [node.name for node in program.graph.nodes if node.op.startswith("call_")]
    whole = split(program, dict.fromkeys(computed, 0), relief=[StageRelief(**{kind: tuple(every)})])
    found = outcome(
        lambda: run_stages(whole, **{name: value.clone() for name, value in feeds.items()}), list(program.parameters())
    )
    assert_same(found, expected, exact=True)
    for name, buffer in model.named_buffers():
        assert torch.equal(program.get_buffer(name), buffer)
