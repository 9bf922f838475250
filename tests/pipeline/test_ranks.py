from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.pipeline.ranks import run_ranks
from torch_lms.pipeline.torch_backend import is_available

needs_pipelining = pytest.mark.skipif(not is_available(), reason="this PyTorch has no torch.distributed.pipelining")


@pytest.mark.slow
def test_two_ranks_train_like_one_under_every_schedule(tmp_path: Path) -> None:
    for ended in run_ranks("tests.pipeline.scenarios:all_is_well", 2, tmp_path):
        assert ended.status == 0, ended.output


@pytest.mark.slow
def test_ranks_that_give_segments_up_train_as_those_with_room(tmp_path: Path) -> None:
    for ended in run_ranks("tests.pipeline.relief_scenarios:relieved_ranks", 2, tmp_path):
        assert ended.status == 0, ended.output


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_steps_of_other_shapes_are_those_of_one_device(world: int, tmp_path: Path) -> None:
    for ended in run_ranks("tests.pipeline.shape_scenarios:shapes_change", world, tmp_path):
        assert ended.status == 0, ended.output


@pytest.mark.slow
@needs_pipelining
def test_ranks_that_cannot_do_a_step_together_are_told_why(tmp_path: Path) -> None:
    for ended in run_ranks("tests.pipeline.shape_scenarios:shapes_that_cannot_change+closed_too_early", 2, tmp_path):
        assert ended.status == 0, ended.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "world", "cause"),
    [
        pytest.param("dies_under_torch", 3, "rank 2 died", marks=needs_pipelining),
        ("dies_with_a_child", 2, "rank 1 died"),
        ("keeper_of_the_store_dies", 3, "rank 0 died: the store"),
        ("fails_under_own", 2, "rank 1 failed: .*no more numbers"),
        ("batch_that_does_not_divide", 2, "rank 0 failed: .*3 microbatches divide, found 4"),
    ],
)
def test_the_death_of_a_rank_ends_the_others_with_an_error_that_names_it(
    scenario: str, world: int, cause: str, tmp_path: Path
) -> None:
    store = "tcp" if scenario == "keeper_of_the_store_dies" else "file"
    ended = run_ranks(f"tests.pipeline.scenarios:{scenario}", world, tmp_path, store=store)
    culprit = int(cause.split()[1])
    for rank, one in enumerate(ended):
        assert one.status != 0, one.output
        if rank != culprit:
            assert one.status == 1, one.output
            assert re.search(cause, one.output), one.output
