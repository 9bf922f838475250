"""A model spread over ranks trains as one process with all gradients would, bit for bit."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.pipeline.ranks import run_ranks


def expect_success(scenario: str, world: int, tmp_path: Path) -> None:
    for rank, ended in enumerate(run_ranks(f"tests.chunk.{scenario}", world, tmp_path, timeout_s=150)):
        assert ended.status == 0, f"rank {rank} of {scenario}:\n{ended.output[-4000:]}"


# Ranks are processes of their own, which chaos mode does not reach, and have limits in time themselves.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    "scenarios",
    [
        "spread_models:gpt+rnn+mlp+checkpointed+on_the_host+streamed",
        "spread_models:backwards+optimizers+normed",
        "spread_models:routed+adapted+checkpointing+clipping+without_bytes+ordered",
        "spread_running:refusals+memory",
        "spread_uses:odd_uses+normed_experts+attending+gradients_by_hand+unlike_ranks",
        "spread_uses:nothing_leaks+kinds_of_tensors+ends_early",
        "spread_uses:partly_optimized+writes",
    ],
)
def test_two_ranks(scenarios: str, tmp_path: Path) -> None:
    expect_success(scenarios, 2, tmp_path)


def test_units_that_are_connected_at_random(tmp_path: Path) -> None:
    for rank, ended in enumerate(run_ranks("tests.chunk.random_units:connected", 2, tmp_path)):
        assert ended.status == 0, f"rank {rank}:\n{ended.output[-4000:]}"


def test_three_ranks(tmp_path: Path) -> None:
    scenario = "spread_models:checkpointing+clipping+tests.chunk.spread_running:memory+in_other_groups"
    expect_success(scenario, 3, tmp_path)


def test_two_stages_of_a_pipeline_on_two_ranks_each(tmp_path: Path) -> None:
    expect_success("spread_running:beside_a_pipeline", 4, tmp_path)


def test_what_two_ranks_keep_is_paged_within_a_limit(tmp_path: Path) -> None:
    expect_success("spread_running:within_a_limit", 2, tmp_path)


def test_a_rank_that_dies_is_an_error_on_the_others(tmp_path: Path) -> None:
    *others, last = run_ranks("tests.chunk.spread_running:dying", 3, tmp_path, timeout_s=170)
    assert last.status == -signal.SIGKILL
    assert [one.status for one in others] == [7, 7], others[0].output[-4000:]


def test_a_training_that_was_killed_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    first, second = run_ranks("tests.chunk.spread_running:saving", 2, tmp_path, timeout_s=170)
    assert (first.status, second.status) == (0, -signal.SIGKILL), first.output[-4000:]
    for world, scenario in [(2, "resuming"), (3, "resuming"), (1, "resuming_alone")]:
        (tmp_path / "meeting").unlink(missing_ok=True)
        expect_success(f"spread_running:{scenario}", world, tmp_path)
