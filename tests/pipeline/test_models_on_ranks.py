from __future__ import annotations

from pathlib import Path

import pytest

from tests.pipeline.ranks import run_ranks
from torch_lms.pipeline.torch_backend import is_available

pytest.importorskip("transformers")


@pytest.mark.slow
@pytest.mark.skipif(not is_available(), reason="transformers needs a newer PyTorch")
def test_models_of_transformers_train_on_three_ranks_as_on_one_device(tmp_path: Path) -> None:
    for ended in run_ranks("tests.pipeline.model_scenarios:models_train", 3, tmp_path, timeout_s=150):
        assert ended.status == 0, ended.output
