"""What stages hold as they run, against what the planner says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pipeline.ranks import run_ranks
from torch_lms.pipeline.torch_backend import is_available


@pytest.mark.skipif(not is_available(), reason="zero bubble needs torch.distributed.pipelining")
def test_stages_hold_what_the_planner_says_between_the_two_parts_of_a_backward(tmp_path: Path) -> None:
    for ended in run_ranks("tests.pipeline.memory_scenarios:half_done_microbatches", 3, tmp_path):
        assert ended.status == 0, ended.output


@pytest.mark.skipif(not is_available(), reason="several stages on a rank need torch.distributed.pipelining")
def test_stages_of_one_rank_let_go_of_what_they_hand_on(tmp_path: Path) -> None:
    (ended,) = run_ranks("tests.pipeline.memory_scenarios:stages_of_one_rank", 1, tmp_path)
    assert ended.status == 0, ended.output
