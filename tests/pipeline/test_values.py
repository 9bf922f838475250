from __future__ import annotations

from pathlib import Path

import pytest

from tests.pipeline.ranks import run_ranks

SCENARIOS = ("conjugated_values", "mappings", "targets_in_mappings", "state_dicts_for_nobody")


@pytest.mark.slow
def test_ranks_understand_values_of_unusual_kinds(tmp_path: Path) -> None:
    for ended in run_ranks(f"tests.pipeline.value_scenarios:{'+'.join(SCENARIOS)}", 2, tmp_path):
        assert ended.status == 0, ended.output
