"""The benchmark of pipelines goes by itself, for each kind of model, and its splits compute what the model does."""

from __future__ import annotations

import json
import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import pipeline_rounds
from benchmarks.pipeline_gpt import even_split
from benchmarks.pipeline_largest import judge as judge_largest
from benchmarks.pipeline_largest import largest
from benchmarks.pipeline_models import MODELS
from benchmarks.pipeline_rounds import judge, reason_of
from benchmarks.pipeline_splits import ByHand, splits_by_hand
from tests.pipeline.ranks import ROOT, run_as_torchrun
from torch_lms.errors import PartitionError
from torch_lms.partition.costs import CostGraph, CostNode, DeviceSpec
from torch_lms.partition.interface import PartitionProblem
from torch_lms.pipeline.torch_backend import is_available

MICROBATCHES = 4


def first_loss(model_name: str) -> float:
    """Of the model itself, a microbatch after the other."""
    shape = MODELS[model_name]["cpu"]
    torch.manual_seed(0)
    model = shape.make()
    batch = shape.batch(MICROBATCHES * shape.rows, 0)
    losses = []
    for index in range(MICROBATCHES):
        found: Any = model(**{name: value.chunk(MICROBATCHES)[index] for name, value in batch.items()})
        losses.append(getattr(found, "loss", found).item())
    return sum(losses) / MICROBATCHES


@pytest.mark.slow
@pytest.mark.skipif(not is_available(), reason="the benchmark's models need a newer PyTorch")
@pytest.mark.parametrize(
    ("words", "file", "splits"),
    [
        (
            ["--splits", "automatic,2/2,automatic@90,torchgpipe,hand@0", "--algorithm", "dp"],
            "pipeline_gpt_cpu",
            ["automatic", "2/2", "automatic@90", "torchgpipe"],
        ),
        (
            ["--schedule", "zero_bubble", "--algorithm", "dp"],
            "pipeline_gpt_cpu_zero_bubble_4stages",
            ["automatic", "1/1/1/1"],
        ),
    ],
)
def test_two_ranks_run_all_splits(words: list[str], file: str, splits: list[str], tmp_path: Path) -> None:
    tiny = ["--device", "cpu", "--steps", "1", "--profile-runs", "2", "--output", str(tmp_path)]
    run_as_torchrun(tmp_path, "benchmarks.pipeline_gpt", *tiny, *words)
    found = json.loads((tmp_path / f"{file}.json").read_text())
    names = [row["split"] for row in found["rows"]]
    assert names[: len(splits)] == splits
    assert bool(names[len(splits) :]) == any("hand@" in word for word in words)
    assert all(re.fullmatch(r"\d(/\d)+", name) for name in names[len(splits) :])
    stages = len(splits[1].split("/"))
    for row in found["rows"]:
        assert row["loss"] == found["rows"][0]["loss"] == pytest.approx(first_loss("gpt"), rel=1e-5)
        for stage in range(stages):
            assert row[f"stage{stage}_nodes"] > 0
            assert row[f"stage{stage}_ms"] > 0
            assert row[f"stage{stage}_predicted_ms"] > 0
            assert row[f"stage{stage}_predicted_peak_gib"] > 0
            assert row[f"stage{stage}_peak_gib"] is None  # the CPU does not count


@pytest.mark.slow
@pytest.mark.skipif(not is_available(), reason="the benchmark's models need a newer PyTorch")
def test_rounds_of_fresh_processes_are_added_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    given = Namespace(device="cpu", model="gpt", ranks=2, steps=1, profile_runs=1)
    run = pipeline_rounds.run_once(given, "1f1b", "automatic")
    steps_ms = [run["step_ms"], 3 * run["step_ms"]]
    of_rounds = iter(steps_ms)
    monkeypatch.setattr(pipeline_rounds, "run_once", lambda *_: {**run, "step_ms": next(of_rounds)})
    words = ["--device=cpu", "--ranks=2", "--rounds=2", "--ways=1f1b:automatic", f"--output={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["pipeline_rounds", *words])
    pipeline_rounds.main()
    found = json.loads((tmp_path / "pipeline_rounds_gpt_cpu.json").read_text())
    (row,) = found["rows"]
    assert (row["key"], row["rounds"], len(row["step_ms_all"])) == ("1f1b:automatic", 2, 2)
    assert (row["least_ms"], row["most_ms"]) == tuple(steps_ms)
    assert row["step_ms"] == pytest.approx(2 * steps_ms[0])
    assert row["predicted_ms"] > 0


def test_blocks_of_encoders_and_decoders_are_split_evenly_and_by_hand() -> None:
    pytest.importorskip("transformers")
    assert first_loss("t5") > 0
    job: Any = Namespace(model="t5", stages=4, shape=MODELS["t5"]["cpu"])
    assert even_split(job) == "1/1/1/1"
    problem = chain("shared", "encoder.block.0", "encoder.block.1.layer.0", "decoder.block.0", "decoder.block.1")
    assert list(ByHand((3, 1)).partition(problem).stage_of.values()) == [0, 0, 0, 0, 1]


def test_rounds_are_judged_by_schedule() -> None:
    def row(key: str, step_ms: float, predicted_ms: float, cap_gib: float | None = None) -> dict[str, Any]:
        schedule, _, split = key.partition(":")
        own = {"key": key, "schedule": schedule, "split": split, "step_ms": step_ms, "predicted_ms": predicted_ms}
        return {**own, "stage_off": 0.01, "peak_off": 0.06, "peak_gib": 9.0, "cap_gib": cap_gib}

    rows = [row("1f1b:automatic", 100, 99), row("1f1b:2/2", 98, 98), row("1f1b:automatic@70", 116, 100, 8.0)]
    found = {check.what: (check.measured, check.ok) for check in judge([*rows, row("zero_bubble:automatic", 103, 95)])}
    assert found["1f1b: automatic over the best by hand"] == (1.0204, False)
    assert found["1f1b:automatic@70: over the step without a cap"] == (1.16, False)
    assert found["1f1b:automatic@70: peak over its cap"] == (1.125, False)
    assert found["1f1b:automatic: predicted step off"] == (0.01, True)
    assert found["1f1b:automatic: predicted peaks off"] == (0.06, False)
    assert found["fastest schedule"] == ("1f1b", False)


def chain(*modules: str) -> PartitionProblem:
    """Nodes one after the other, each in a module, for two devices."""
    nodes = [
        CostNode(name=f"n{place}", module=module, kind="call_function", inputs=(f"n{place - 1}",) if place else ())
        for place, module in enumerate(modules)
    ]
    return PartitionProblem(graph=CostGraph(nodes=tuple(nodes)), devices=(DeviceSpec(name="a"), DeviceSpec(name="b")))


def test_a_split_by_hand_ends_before_the_first_line_of_a_block() -> None:
    problem = chain("embed", "h.blocks.0.mix", "h.blocks.0", "", "h.blocks.1.mix", "h.blocks.2", "", "head")
    stages = {blocks: ByHand(blocks).partition(problem).stage_of for blocks in [(1, 2), (2, 1)]}
    assert list(stages[1, 2].values()) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert list(stages[2, 1].values()) == [0, 0, 0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("blocks", [(1, 1), (1, 1, 1), (3,)])
def test_a_split_by_hand_has_all_blocks_and_all_stages(blocks: tuple[int, ...]) -> None:
    with pytest.raises(PartitionError, match="3 blocks in 2 stages, found " + "/".join(map(str, blocks))):
        ByHand(blocks).partition(chain("blocks.0", "blocks.1", "blocks.2"))


def test_the_best_splits_by_hand_come_first_and_others_not_at_all() -> None:
    names = ["embed", *(f"blocks.{index}" for index in range(5)), "head"]
    times_us = [1.0, *[10.0] * 5, 19.0]
    nodes = tuple(
        CostNode(name=f"n{index}", module=name, forward_us=time_us, inputs=(f"n{index - 1}",) if index else ())
        for index, (name, time_us) in enumerate(zip(names, times_us, strict=True))
    )
    problem = PartitionProblem(graph=CostGraph(nodes=nodes), devices=(DeviceSpec(name="d0"), DeviceSpec(name="d1")))
    assert splits_by_hand(problem, 0) == ["3/2"]
    steps_us = {blocks: ByHand(blocks).partition(problem).figures.step.step_us for blocks in [(3, 2), (4, 1), (2, 3)]}
    percent = 100 * (steps_us[2, 3] / steps_us[3, 2] - 1)
    assert splits_by_hand(problem, percent + 1) == [
        "/".join(map(str, blocks)) for blocks in sorted(steps_us, key=steps_us.__getitem__)
    ]
    assert splits_by_hand(problem, 100, most=1) == ["3/2"]


def test_the_largest_microbatch_is_the_last_that_fits() -> None:
    given = Namespace(cap_gib=16.0, start_rows=8, most_rows=100, microbatches=8)
    asked: list[tuple[str, ...]] = []

    def run(given: Namespace, schedule: str, split: str, words: Sequence[str]) -> dict[str, Any]:
        asked.append((schedule, split, *words))
        rows = int(words[words.index("--rows") + 1])
        if rows > (30 if split == "automatic" else 11):
            raise RuntimeError("out of memory")
        return {"step_ms": 100.0 * rows, "recomputed": 1, "swapped": 0, "stage0_nodes": 3, "stage0_peak_gib": 15.0}

    rows = {way: largest(way, given, run) for way in ("torchgpipe", "ours")}
    assert (rows["torchgpipe"]["rows"], rows["torchgpipe"]["rows_per_s"]) == (11, 80.0)
    assert 28 <= rows["ours"]["rows"] <= 30
    assert {words[:2] for words in asked} == {("gpipe", "torchgpipe"), ("1f1b", "automatic")}
    assert all(words[-2:] == ("--cap-gib", "16.0") for words in asked)
    (check,) = judge_largest(rows)
    assert check.ok
    given.most_rows = 2
    assert largest("ours", given, run)["rows"] == 2


def test_a_failed_run_says_what_its_ranks_raised() -> None:
    words = """W1126 some warning
[rank1]: Traceback (most recent call last):
[rank1]: torch.distributed.pipelining._utils.PipeliningShapeError: a stride mismatch
[rank0]: torch.distributed.pipelining._utils.PipeliningShapeError: a stride mismatch
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
FAILED"""
    assert reason_of(words) == "torch.distributed.pipelining._utils.PipeliningShapeError: a stride mismatch"
    assert reason_of("killed") == "killed"
    ended = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n  exitcode  : -11 (pid: 7)\n"
    assert reason_of(ended) == ended
    assert reason_of(f"[rank1]: AssertionError\n{ended}") == "AssertionError"
