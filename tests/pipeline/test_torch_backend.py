from __future__ import annotations

import pickle

import pytest

from tests.unit.fresh_process import run_python
from torch_lms.pipeline.torch_backend import is_available

IMPORT = """
import sys
sys.modules["torch.distributed.pipelining"] = None  # as with a PyTorch that has none
import torch_lms.pipeline.runner, torch_lms.pipeline.torch_backend
assert "torch_lms.pipeline.torch_stage" not in sys.modules
"""


def test_pytorchs_pipelining_is_imported_only_where_it_is_used() -> None:
    done = run_python("-c", IMPORT)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not is_available(), reason="this PyTorch has no torch.distributed.pipelining")
def test_all_stages_are_of_one_class_that_is_found_by_its_name() -> None:
    from torch_lms.pipeline.torch_stage import OwnStage

    assert pickle.loads(pickle.dumps(OwnStage)) is OwnStage
